"""Shared constants."""

IGNORE_INDEX = -100  # target without a loss, as in torch's cross-entropy

MULTITASK_MODEL_TYPE = "ctx-multitask"

SENTINEL_TOKEN = "<extra_id_{}>"  # the token that stands for a span, by the span's number in the row (T5)

# The fields of a news article in the order of Grover's context (Zellers et al. 2019, section 3.1), the summary last.
NEWS_FIELDS = ("domain", "date", "authors", "title", "article", "summary")
