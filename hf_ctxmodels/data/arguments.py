"""Command-line flags of text data."""

from dataclasses import dataclass, field

from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.document_sources import load_documents
from hf_ctxmodels.data.documents import Documents


@dataclass
class DataArguments:
    """Documents, and the held-out share of them.

    With the same `validation_fraction` all commands hold out the same documents, independent of --seed, so that neither
    tokenizers nor models are trained on them.
    """

    dataset: list[str] = field(
        metadata={
            "help": "One or more of: `demo`, a local .txt, .jsonl or .parquet file (plain or .gz), a quoted pattern of "
            "such files, a directory, a Hub id, or FILE=FIRST,SECOND,LABEL (a table of labelled pairs and its columns)."
        }
    )
    dataset_config: str | None = flag(None, "Configuration of a Hub dataset.")
    dataset_split: str = flag("train", "Split of a Hub dataset or directory.")
    language_tags: list[str] = flag(
        (), "Tag for each --dataset, such as `<de>`, prepended to its sentences or translations; `-` for none."
    )
    translations: list[str] = flag((), "File for each --dataset with the translations of its lines; `-` for none.")
    news_articles: bool = flag(
        False,
        "Each --dataset is a .jsonl of news articles with the fields domain, date, authors, title, article, summary.",
    )
    text_column: str = flag("text", "Column with the text of a document, except in .txt.")
    units_column: str | None = flag(
        None,
        "Column with a list of the phrases in a text that are masked as units; by default the phrases of the "
        "objective option `units`.",
    )
    streaming: bool = flag(False, "Stream the data instead of loading it first.")
    sampling_alpha: float | None = flag(
        None,
        "Sample from several --dataset with n sentences each in proportion to n^alpha, such as 0.3 or 0.5 for "
        "languages of unequal size; by default all text once per epoch.",
    )
    skip_empty_documents: bool = flag(False, "Skip documents without text instead of stopping.")
    validation_fraction: float = flag(0.05, "Share of held-out documents; 0 for none.")

    def load(self) -> tuple[Documents, Documents | None]:
        """The training documents, and the held-out documents or None."""
        documents = load_documents(
            *self.dataset,
            split=self.dataset_split,
            text_column=self.text_column,
            units_column=self.units_column,
            config_name=self.dataset_config,
            streaming=self.streaming,
            skip_empty=self.skip_empty_documents,
            language_tags=self.language_tags,
            translations=self.translations,
            news_articles=self.news_articles,
        )
        return documents.split(self.validation_fraction) if self.validation_fraction else (documents, None)
