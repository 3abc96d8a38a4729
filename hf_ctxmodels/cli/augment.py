r"""Make more training examples of a task's, for a student that learns from a teacher.

    hf-ctxmodels augment --model runs/bert --vectors runs/glove --input train.tsv --text_columns sentence \
        --copies 20 --output augmented.jsonl

Each example is written as it is and in copies with other words, in which the label is the example's: it is the teacher
that knows the copy's. By default words become what a masked language model and word vectors put in their place
(TinyBERT: 10 copies for MNLI and QQP, 20 for SST-2 and QNLI, 30 for CoLA, MRPC, STS-B and RTE). `--rule masking` masks
words and cuts n-grams out (Tang et al. 2019), with the tokenizer of --model alone.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import AutoModel

from hf_ctxmodels.compression.distillation.augmentation import Augmenter, Masking, Substitution
from hf_ctxmodels.compression.distillation.teacher import Teacher
from hf_ctxmodels.conversion.word_vectors import WordVectors
from hf_ctxmodels.core.console import progress_bar
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.core.output_files import check_output_file, wrap_write_errors
from hf_ctxmodels.data.table_files import read_table
from hf_ctxmodels.downstream.tasks.base import get_texts
from hf_ctxmodels.evaluation import WordSpace
from hf_ctxmodels.training.model_loading import load_config, load_model, load_tokenizer
from hf_ctxmodels.training.recipe import parse_arguments


@dataclass(kw_only=True)
class AugmentArguments:
    """Which examples, and how they are changed."""

    model: str = field(metadata={"help": "Directory or Hub id of a masked language model with a WordPiece tokenizer."})
    vectors: str | None = flag(
        None, "Directory or Hub id of word vectors (glove, word2vec), for words of several pieces; without, they stay."
    )
    input: str = field(metadata={"help": "Examples: .csv, .tsv, .txt (tab-separated) or .jsonl, each may end in .gz."})
    output: str = field(metadata={"help": "Write the examples and their copies here, as .jsonl."})
    text_columns: str = flag("text", "Column of the text, or two for pairs, separated by a comma.")
    label_column: str = flag("label", "Column of the label.")
    rule: Literal["substitution", "masking"] = flag("substitution", "How texts are changed.")
    copies: int = flag(20, "Copies of each example; equal ones are left out.")
    candidates: int = flag(15, "substitution: words that may come in the place of one.")
    probability: float = flag(0.4, "substitution: share of the words that are replaced.")
    mask_probability: float = flag(0.1, "masking: share of the words that are masked.")
    ngram_probability: float = flag(0.25, "masking: share of the copies that become an n-gram of the text.")
    seed: int = flag(0, "Seed of the draws.")
    overwrite: bool = flag(False, "Replace the file if it exists.")

    def __post_init__(self) -> None:
        for name in ("probability", "mask_probability", "ngram_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise CtxError(f"--{name} is a share.", location=f"--{name} {getattr(self, name)}", hint="give 0 to 1.")
        for name in ("copies", "candidates"):
            if getattr(self, name) < 1:
                raise CtxError(f"--{name} must be 1 or more.", location=f"--{name} {getattr(self, name)}", hint="1, 20")


def main() -> None:
    """Read, change, write."""
    (arguments,) = parse_arguments(AugmentArguments, description=__doc__)
    check_output_file(arguments.output, flag="--output", overwrite=arguments.overwrite, inputs=[arguments.input])
    columns = [column.strip() for column in arguments.text_columns.split(",")]
    rows = read_table(arguments.input, [*columns, arguments.label_column])
    augmenter = Augmenter(make_rule(arguments), arguments.copies, arguments.seed)
    lines = []
    for index, row in enumerate(progress_bar(rows, "changing words", unit="examples", enabled=True)):
        label = {arguments.label_column: row.values[arguments.label_column]}
        for texts in augmenter.augment(get_texts(row, columns), index):
            lines.append(json.dumps(dict(zip(columns, texts, strict=True)) | label, ensure_ascii=False) + "\n")
    output = Path(arguments.output)
    with wrap_write_errors(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary = output.with_name(f"{output.name}.writing")
        temporary.write_text("".join(lines), encoding="utf-8")
        temporary.replace(output)
    print(f"{len(rows)} examples became {len(lines)}, in {output}")


def make_rule(arguments: AugmentArguments) -> Substitution | Masking:
    """How texts are changed.

    Raises:
        CtxError: The model or the vectors cannot be opened, or cannot replace words.
    """
    if arguments.rule == "masking":
        tokenizer = load_tokenizer(arguments.model)
        if tokenizer.mask_token is None:
            raise CtxError(f"{type(tokenizer).__name__} has no mask token.", location=f"--model {arguments.model}")
        return Masking(tokenizer, arguments.mask_probability, arguments.ngram_probability)
    opened = Teacher.open(arguments.model)
    model = opened.load("AutoModelForMaskedLM")
    options = {"number": arguments.candidates, "probability": arguments.probability}
    return Substitution(model, opened.tokenizer, nearest_words(arguments.vectors), **options)  # type: ignore[arg-type]


def nearest_words(vectors: str | None) -> Callable[[str, int], list[str]]:
    """(word, number) -> its nearest words in a model of word vectors; none without a model, and for unknown words."""
    if vectors is None:
        return lambda word, number: []
    model: Any = load_model(vectors, AutoModel.__name__, load_config(vectors))
    space = WordSpace(WordVectors.from_model(model, load_tokenizer(vectors)))

    def nearest(word: str, number: int) -> list[str]:
        return [other for other, _ in space.most_similar(word, number)] if word in space else []

    return nearest
