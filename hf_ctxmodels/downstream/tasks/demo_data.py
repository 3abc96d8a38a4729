"""Demo data for classification, from the package gensim: 200 sentences of film reviews, half of them positive."""

from hf_ctxmodels.data.demo_corpus import demo_file
from hf_ctxmodels.data.table_files import Row

POLARITY = "pang_lee_polarity.cor"

VALIDATION_EVERY = 5  # the file is sorted by label, so that every fifth sentence is a balanced sample


def demo_rows(split: str) -> list[Row]:
    """Rows with the columns `text` and `label` ("neg" or "pos"): 160 for split "train", 40 for "validation".

    The sentences are from Pang & Lee's polarity data. Raises CtxError when gensim is not installed.
    """
    path = demo_file(POLARITY)
    rows = []
    for number, line in enumerate(path.read_text(encoding="windows-1252").splitlines()):
        label, _, text = line.partition(" ")
        if (number % VALIDATION_EVERY == VALIDATION_EVERY - 1) == (split == "validation"):
            rows.append(Row({"text": text.strip(), "label": label.removeprefix("__label__")}, f"demo:{number + 1}"))
    return rows
