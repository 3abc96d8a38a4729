"""The flags that say which text a script reads."""

from dataclasses import dataclass, field
from typing import Any

from hf_ctxmodels.data.documents import Documents, load_documents


def _flag(default: object, explanation: str) -> Any:
    return field(default=default, metadata={"help": explanation})


@dataclass
class DataArguments:
    """Which documents, and which of them are held out."""

    dataset: str = field(
        metadata={"help": "`demo`, a local .txt, .jsonl or .parquet file (plain or .gz), a directory, or a Hub id."}
    )
    dataset_config: str | None = _flag(None, "Configuration of a Hub data set.")
    dataset_split: str = _flag("train", "Split of a Hub data set or directory.")
    text_column: str = _flag("text", "Column that holds the text of a document, except in .txt.")
    streaming: bool = _flag(False, "Read while working instead of loading everything first.")
    skip_empty_documents: bool = _flag(False, "Pass over documents without text instead of stopping.")
    validation_fraction: float = _flag(0.05, "Share of the documents held out, one of every 1/share in a row.")

    def load(self) -> Documents:
        """Open the documents, all of them; `Documents.split(validation_fraction)` holds a part out."""
        return load_documents(
            self.dataset,
            split=self.dataset_split,
            text_column=self.text_column,
            config_name=self.dataset_config,
            streaming=self.streaming,
            skip_empty=self.skip_empty_documents,
        )
