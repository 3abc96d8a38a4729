"""The flags that say which text a script reads."""

from dataclasses import dataclass, field

from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.documents import Documents
from hf_ctxmodels.data.sources import load_documents


@dataclass
class DataArguments:
    """Which documents, and which of them are held out.

    For one `validation_fraction` all scripts hold out the same documents, whatever --seed is: those that a tokenizer
    was not trained on are those that no model sees either.
    """

    dataset: list[str] = field(
        metadata={
            "help": "`demo`, a local .txt, .jsonl or .parquet file (plain or .gz) or a quoted pattern of such files, a "
            "directory, a Hub id, or FILE=FIRST,SECOND,LABEL, a table of pairs of texts and its columns; or several of "
            "these, which are read one after the other."
        }
    )
    dataset_config: str | None = flag(None, "Configuration of a Hub data set.")
    dataset_split: str = flag("train", "Split of a Hub data set or directory.")
    language_tags: list[str] = flag(
        (),
        "A word for each of --dataset, put in front of each of its sentences, or of its translations: `<de>`, say, "
        "where languages have one; `-` for none.",
    )
    translations: list[str] = flag(
        (), "A file of lines for each of --dataset, which then is one too: line by line its translation; `-` for none."
    )
    text_column: str = flag("text", "Column that holds the text of a document, except in .txt.")
    streaming: bool = flag(False, "Read while working instead of loading everything first.")
    sampling_alpha: float | None = flag(
        None,
        "Draw each example (or text of a vocabulary) from one of several --dataset, of n sentences each, with a chance "
        "proportional to n^alpha: for languages of unequal size, 0.3 or 0.5; by default all text once per epoch.",
    )
    skip_empty_documents: bool = flag(False, "Pass over documents without text instead of stopping.")
    validation_fraction: float = flag(0.05, "Share of the documents held out, one of 1/share in a row; 0 for none.")

    def load(self) -> tuple[Documents, Documents | None]:
        """Open the documents: those to train on, and those held out, if any."""
        documents = load_documents(
            *self.dataset,
            split=self.dataset_split,
            text_column=self.text_column,
            config_name=self.dataset_config,
            streaming=self.streaming,
            skip_empty=self.skip_empty_documents,
            language_tags=self.language_tags,
            translations=self.translations,
        )
        return documents.split(self.validation_fraction) if self.validation_fraction else (documents, None)
