r"""Augment the training examples of a task for distillation.

    hf-ctxmodels data augment --model runs/bert --rule substitution:vectors=runs/glove --input train.tsv \
        --text_columns sentence --copies 20 --output augmented.jsonl

The output has each example and changed copies with its label; distillation replaces the labels of the copies by the
predictions of the teacher. By default words are substituted by candidates of a masked language model and of word
vectors (TinyBERT: 10 copies for MNLI and QQP, 20 for SST-2 and QNLI, 30 for CoLA, MRPC, STS-B and RTE). `--rule
masking` masks words and samples n-grams (Tang et al. 2019), with the tokenizer of --model alone.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoModel

from hf_ctxmodels.compression.distillation.augmentation import Augmenter, Masking, Substitution
from hf_ctxmodels.compression.distillation.teacher import Teacher
from hf_ctxmodels.conversion.word_vectors import WordVectors
from hf_ctxmodels.core.console import progress_bar
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, check_range, choice_flag, flag, parse_choices
from hf_ctxmodels.core.output_files import check_output_file, wrap_write_errors
from hf_ctxmodels.data.table_files import read_table
from hf_ctxmodels.downstream.tasks.base import get_texts
from hf_ctxmodels.evaluation import WordSpace
from hf_ctxmodels.training.model_loading import load_config, load_model, load_tokenizer
from hf_ctxmodels.training.recipe import parse_arguments


@dataclass(frozen=True)
class SubstitutionOptions:
    """Substitute words (TinyBERT)."""

    vectors: str | None = flag(
        None, "Word vectors (glove, word2vec) that substitute words of several tokens; by default these words are kept."
    )
    candidates: int = flag(15, "Candidates for each word.")
    probability: float = flag(0.4, "Probability of substituting a word.")

    def __post_init__(self) -> None:
        check_range(self, "candidates", at_least=1, location="--rule substitution")
        check_range(self, "probability", at_least=0, at_most=1, location="--rule substitution")


@dataclass(frozen=True)
class MaskingOptions:
    """Mask words and sample n-grams."""

    mask_probability: float = flag(0.1, "Probability of masking a word.")
    ngram_probability: float = flag(0.25, "Probability that a copy is an n-gram of the text.")

    def __post_init__(self) -> None:
        check_range(self, "mask_probability", "ngram_probability", at_least=0, at_most=1, location="--rule masking")


@dataclass(kw_only=True)
class AugmentationArguments:
    """Examples and augmentation rule."""

    model: str = flag(REQUIRED, "Directory or Hub id of a masked language model with a WordPiece tokenizer.")
    input: str = flag(REQUIRED, "Examples: .csv, .tsv, .txt (tab-separated) or .jsonl, optionally .gz.")
    output: str = flag(REQUIRED, "JSONL file for the examples and their copies.")
    text_columns: str = flag("text", "Column of the text, or two for pairs, separated by a comma.")
    label_column: str = flag("label", "Column of the label.")
    rule: SubstitutionOptions | MaskingOptions = choice_flag(
        "substitution", "Augmentation rule.", {"substitution": SubstitutionOptions, "masking": MaskingOptions}
    )
    copies: int = flag(20, "Copies of each example; duplicates are dropped.")
    seed: int = flag(0, "Random seed.")
    overwrite: bool = flag(False, "Replace the file if it exists.")

    def __post_init__(self) -> None:
        parse_choices(self)
        check_range(self, "copies", at_least=1)


def main() -> None:
    """Augment the examples of a file."""
    (arguments,) = parse_arguments(AugmentationArguments, description=__doc__)
    check_output_file(arguments.output, flag="--output", overwrite=arguments.overwrite, inputs=[arguments.input])
    columns = [column.strip() for column in arguments.text_columns.split(",")]
    rows = read_table(arguments.input, [*columns, arguments.label_column])
    augmenter = Augmenter(make_rule(arguments), arguments.copies, arguments.seed)
    lines = []
    for index, row in enumerate(progress_bar(rows, "augmenting", unit="examples", enabled=True)):
        label = {arguments.label_column: row.values[arguments.label_column]}
        for texts in augmenter.augment(get_texts(row, columns), index):
            lines.append(json.dumps(dict(zip(columns, texts, strict=True)) | label, ensure_ascii=False) + "\n")
    output = Path(arguments.output)
    with wrap_write_errors(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary = output.with_name(f"{output.name}.writing")
        temporary.write_text("".join(lines), encoding="utf-8")
        temporary.replace(output)
    print(f"{len(rows)} examples augmented to {len(lines)}, in {output}")


def make_rule(arguments: AugmentationArguments) -> Substitution | Masking:
    """Create the augmentation rule of the flags.

    Raises:
        CtxError: The model or the vectors cannot be opened, or cannot replace words.
    """
    rule = arguments.rule
    if isinstance(rule, MaskingOptions):
        tokenizer = load_tokenizer(arguments.model)
        if tokenizer.mask_token is None:
            raise CtxError(f"{type(tokenizer).__name__} has no mask token.", location=f"--model {arguments.model}")
        return Masking(tokenizer, rule.mask_probability, rule.ngram_probability)
    checkpoint = Teacher.open(arguments.model)
    model = checkpoint.load("AutoModelForMaskedLM")
    nearest = nearest_words(rule.vectors)
    return Substitution(model, checkpoint.tokenizer, nearest, number=rule.candidates, probability=rule.probability)


def nearest_words(vectors: str | None) -> Callable[[str, int], list[str]]:
    """Function from a word and a number to its nearest words; empty for unknown words and without word vectors."""
    if vectors is None:
        return lambda word, number: []
    model: Any = load_model(vectors, AutoModel.__name__, load_config(vectors))
    space = WordSpace(WordVectors.from_model(model, load_tokenizer(vectors)))

    def nearest(word: str, number: int) -> list[str]:
        return [neighbour for neighbour, _ in space.most_similar(word, number)] if word in space else []

    return nearest
