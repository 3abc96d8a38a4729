"""Shared constants."""

IGNORE_INDEX = -100  # label without a loss, as in torch's cross-entropy

MAX_SEED = 2**32 - 1  # largest seed of NumPy's generators

ROOT_HEAD = -1  # head of the root of a dependency tree

NO_TARGET = -1  # padding of `target_positions` (XLNet)

MULTITASK_MODEL_TYPE = "ctx-multitask"

SENTINEL_TOKEN = "<extra_id_{}>"  # token that replaces the span of this number (T5)

# Fields of a news article in the order of Grover's context (Zellers et al. 2019, section 3.1), the summary last.
NEWS_FIELDS = ("domain", "date", "authors", "title", "article", "summary")
