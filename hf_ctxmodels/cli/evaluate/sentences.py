r"""Evaluate sentence vectors without fine-tuning: similarity, linear probes, retrieval of translations.

    hf-ctxmodels evaluate sentences --model runs/infersent --similarity stsb-en-test.csv=1,2,3 \
        --classification SST-2/train.tsv.gz,SST-2/test.tsv=sentence,label
    hf-ctxmodels evaluate sentences --model runs/laser --retrieval verses.en.txt,verses.de.txt
    hf-ctxmodels evaluate sentences --model runs/xlm --pooling mean --retrieval en=verses.en.txt,de=verses.de.txt
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args

from transformers import AutoModel

from hf_ctxmodels.architectures.sentence_encoder import encode_sentences
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.text_files import read_lines
from hf_ctxmodels.downstream.loading_with_adapters import load_model_with_adapters
from hf_ctxmodels.evaluation import (
    Criterion,
    Encode,
    SentenceSimilarity,
    classification,
    relatedness,
    retrieval,
    similarity,
)
from hf_ctxmodels.layers.pooling import Pooling
from hf_ctxmodels.tokenizers.base import check_tokenizer_matches_model
from hf_ctxmodels.training.model_loading import load_config, load_tokenizer
from hf_ctxmodels.training.recipe import parse_arguments


@dataclass
class EvaluationArguments:
    """Model and tests."""

    model: str = field(metadata={"help": "Checkpoint directory or Hub id."})
    pooling: str | None = field(
        default=None,
        metadata={
            "help": "Pooling of the hidden states; by default the pooling of the model.",
            "choices": list(get_args(Pooling)),
        },
    )
    similarity: list[str] = flag((), "FILE=FIRST,SECOND,SCORE: a table and its columns of two texts and a gold score.")
    relatedness: list[str] = flag((), "TRAIN,TEST=FIRST,SECOND,SCORE: tables for a learned regression of the score.")
    classification: list[str] = flag(
        (), "TRAIN,TEST=TEXT,LABEL or TRAIN,TEST=FIRST,SECOND,LABEL: tables and their columns."
    )
    retrieval: list[str] = flag(
        (), "FILE,FILE: texts and their translations, line by line; or CODE=FILE,CODE=FILE for language embeddings."
    )
    batch_size: int = flag(64, "Sentences per batch.")
    seed: int = flag(0, "Seed of the validation split that selects the regularization.")


def parse_tables(text: str, name: str, num_files: int) -> tuple[list[str], list[str]]:
    """Parse `a,b=c,d` to the files `["a", "b"]` and the columns `["c", "d"]`.

    Raises:
        CtxError: The number of files is wrong, or there are no columns.
    """
    sources, equals, columns = text.partition("=")
    files = sources.split(",")
    if len(files) != num_files or not equals:
        raise CtxError(f"Invalid value {text!r}.", location=f"--{name}", hint="see --help for the format.")
    return files, columns.split(",")


def correlation_line(name: str, result: SentenceSimilarity) -> str:
    """Format the result of a similarity test."""
    return f"{name:<44} spearman {result.spearman:.4f}  pearson {result.pearson:.4f}  {result.pairs} pairs"


def parse_translations(text: str) -> list[tuple[str, Path]]:
    """Parse `a,b` to `[("", a), ("", b)]`, and `en=a,de=b` to `[("en", a), ("de", b)]`.

    Raises:
        CtxError: There are not two files, or only one of them has a language.
    """
    sources = [source.rpartition("=") for source in text.split(",")]
    if len(sources) != 2 or len({bool(language) for language, _, _ in sources}) != 1:
        raise CtxError(f"Invalid value {text!r}.", location="--retrieval", hint="see --help for the format.")
    return [(language, Path(file)) for language, _, file in sources]


def retrieval_lines(encode: Encode, tokenizer: Any, text: str) -> list[str]:
    """Compute and format the retrieval of translations in both directions.

    Raises:
        CtxError: The value is invalid, or has languages that the tokenizer does not support.
    """
    sides = parse_translations(text)
    vectors = []
    for language, file in sides:
        if language:
            if not hasattr(tokenizer, "language"):
                raise CtxError(
                    f"{type(tokenizer).__name__} has no languages.", location="--retrieval", hint="omit the languages."
                )
            tokenizer.language = language
        vectors.append(encode([line.strip() for line in read_lines(file)]))
    lines = []
    for first, second in ((0, 1), (1, 0)):
        accuracies = [
            f"{criterion} {retrieval(vectors[first], vectors[second], criterion):.4f}"
            for criterion in get_args(Criterion)
        ]
        name = f"{sides[first][1].name} -> {sides[second][1].name}"
        lines.append(f"{name:<44} {'  '.join(accuracies)}  {len(vectors[0])} pairs")
    return lines


def main() -> None:
    """Evaluate and print."""
    (arguments,) = parse_arguments(EvaluationArguments, description=__doc__)
    config, tokenizer = load_config(arguments.model), load_tokenizer(arguments.model)
    check_tokenizer_matches_model(tokenizer, config, location=arguments.model)
    model = load_model_with_adapters(arguments.model, AutoModel.__name__, config)
    options = {"pooling": arguments.pooling, "batch_size": arguments.batch_size}
    encode = partial(encode_sentences, model, tokenizer, **options)
    for text in arguments.similarity:
        (file,), columns = parse_tables(text, "similarity", 1)
        print(correlation_line(Path(file).name, similarity(encode, file, columns)))
    for text in arguments.relatedness:
        (train, test), columns = parse_tables(text, "relatedness", 2)
        print(correlation_line(test, relatedness(encode, train, test, columns, arguments.seed)))
    for text in arguments.classification:
        (train, test), columns = parse_tables(text, "classification", 2)
        result = classification(encode, train, test, columns, arguments.seed)
        print(
            f"{test:<44} accuracy {result.accuracy:.4f}  majority {result.majority:.4f}  {result.examples[1]} examples"
        )
    for text in arguments.retrieval:
        print("\n".join(retrieval_lines(encode, tokenizer, text)))
