"""Subcommands of `hf-ctxmodels data` for raw text: filters, and overlap with evaluation data."""

import json
import os
from collections import Counter
from dataclasses import dataclass
from inspect import getdoc
from pathlib import Path

from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.console import progress_bar
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, check_range, flag
from hf_ctxmodels.core.output_files import check_output_directory, check_output_file, write_text_file
from hf_ctxmodels.data.benchmark_files import read_benchmark
from hf_ctxmodels.data.cleaning import (
    RULES,
    CleaningRules,
    LanguageFilter,
    TextCleaner,
    check_text_suffix,
    write_documents,
)
from hf_ctxmodels.data.document_sources import DataArguments, document_files, load_documents
from hf_ctxmodels.data.files import file_name
from hf_ctxmodels.data.overlap import OverlapRule, measure_overlap
from hf_ctxmodels.data.text_files import Separator, read_lines

_DATA_FLAGS = ("dataset", "document_separator", "text_column")


@dataclass
class CleaningArguments:
    """Output and rules."""

    output: str = flag(REQUIRED, "File to write: .txt or .jsonl, plain or with .gz or .zst.")
    report: str | None = flag(None, "JSON file for the numbers that the command prints.")
    min_words: int = flag(CleaningRules.min_words, "Minimum number of words in a line.")
    min_sentences: int = flag(CleaningRules.min_sentences, "Minimum number of sentences in a document.")
    bad_words: str | None = flag(None, "File with one word or phrase per line; documents that contain one are removed.")
    language: str | None = flag(None, "Code of the language to keep, such as en; by default all languages.")
    min_language_probability: float = flag(0.99, "Minimum probability of the language.")
    skip_rules: list[str] = flag((), "Rules to disable.", choices=RULES.keys())
    overwrite: bool = flag(False, "Replace --output and --report if they exist.")


def clean() -> None:
    """Remove poor lines and documents, and duplicates, from raw text, by the filters of C4 (Raffel et al. 2020).

        hf-ctxmodels data clean --dataset pages.jsonl.gz --output clean.txt.gz --language en

    Keeps lines that end in terminal punctuation and have at least 5 words, and documents with at least 3 sentences. All
    but one of the spans of three sentences that occur more than once are removed. Prints what each rule removed.
    """
    data, arguments = parse_arguments((DataArguments, _DATA_FLAGS), CleaningArguments, description=getdoc(clean))
    check_text_suffix(arguments.output)
    inputs = (*document_files(data.dataset), arguments.bad_words)
    if arguments.report is not None and os.path.realpath(arguments.report) == os.path.realpath(arguments.output):
        raise CtxError(
            "The report would replace the text.",
            location=f"--output {arguments.output} --report {arguments.report}",
            hint="choose two files.",
        )
    for name in ("output", "report"):
        if (file := getattr(arguments, name)) is not None:
            check_output_file(file, flag=f"--{name}", overwrite=arguments.overwrite, inputs=inputs)
    bad_words = [line.strip() for line in read_lines(arguments.bad_words)] if arguments.bad_words else []
    rules = CleaningRules(
        skip=arguments.skip_rules,
        min_words=arguments.min_words,
        min_sentences=arguments.min_sentences,
        bad_words=[word for word in bad_words if word],
        is_in_language=arguments.language and LanguageFilter(arguments.language, arguments.min_language_probability),
    )
    documents, cleaner = data.open(), TextCleaner(rules)
    write_documents(arguments.output, cleaner.clean(progress_bar(documents.paragraphs(), "cleaning", unit="documents")))
    if arguments.report is not None:
        write_text_file(arguments.report, json.dumps(cleaner.to_json(), indent=2) + "\n")
    print(cleaner.to_text())


@dataclass
class OverlapArguments:
    """Input, output and rule."""

    train: list[str] = flag(REQUIRED, "Training text, in any format of `pretrain --dataset`.")
    test: list[str] = flag(
        REQUIRED, "Evaluation data: .csv, .tsv, .jsonl, .txt, or .json in SQuAD format, optionally .gz or .zst."
    )
    output_dir: str = flag(REQUIRED, "Directory for overlap.json, overlap.md and the clean examples (clean/FILE).")
    text_columns: list[str] = flag(("text",), "Columns of the texts in tables of --test.")
    text_column: str = flag("text", "Column with the text of a document of --train, except in .txt.")
    document_separator: Separator | None = flag(
        None, "End of a document, or of an example, in text files, as in pretrain."
    )
    min_ngram: int = flag(OverlapRule.min_size, "Smallest N.")
    max_ngram: int = flag(OverlapRule.max_size, "Largest N.")
    max_ngram_documents: int = flag(
        OverlapRule.max_documents, "N-grams in more training documents are ignored: phrases in common use."
    )
    num_proc: int = flag(1, "Number of processes; a text of less than 64 MB, or a compressed file, is read by one.")
    overwrite: bool = flag(False, "Replace the files in --output_dir.")


def overlap() -> None:
    """Find the test examples that occur in a training text, by n-grams of words (Brown et al. 2020, appendix C).

        hf-ctxmodels data overlap --train books.txt.gz --test lambada.jsonl --output_dir runs/overlap

    N is the 5th percentile of the examples' lengths in words, at least 8 and at most 13. An example is dirty if one of
    its N-grams occurs in the training text. Also prints the share of the 8-grams of the test data that occur there
    (Radford et al. 2019, section 4), and writes the clean examples in the format of the input.
    """
    (arguments,) = parse_arguments(OverlapArguments, description=getdoc(overlap))
    check_range(arguments, "num_proc", at_least=1)
    rule = OverlapRule(arguments.min_ngram, arguments.max_ngram, arguments.max_ngram_documents)
    names = [file_name(path) for path in arguments.test]
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise CtxError(f"Two files are named {repeated[0]}.", location="--test", hint="run the command for each.")
    files = ["overlap.json", "overlap.md", *(f"clean/{name}" for name in names)]
    check_output_directory(arguments.output_dir, files, flag="--output_dir", overwrite=arguments.overwrite)
    benchmarks = [read_benchmark(path, arguments.text_columns, arguments.document_separator) for path in arguments.test]
    documents = load_documents(
        *arguments.train,
        text_column=arguments.text_column,
        document_separator=arguments.document_separator,
    )
    result = measure_overlap(documents, benchmarks, rule, num_proc=arguments.num_proc, show_progress=True)
    folder = Path(arguments.output_dir)
    for benchmark, file in zip(benchmarks, result.files, strict=True):
        benchmark.write(folder / "clean" / benchmark.name, file.clean)
    write_text_file(folder / "overlap.json", json.dumps(result.to_json(), indent=2, ensure_ascii=False) + "\n")
    write_text_file(folder / "overlap.md", result.to_markdown())
    print(result.to_markdown())
    for file in result.files:
        for example in file.dirty_examples[:3]:
            print(f"{example.location}: {example.first_match}")
