"""Subcommands of `hf-ctxmodels data`."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from inspect import getdoc
from typing import Any, Literal

from transformers import AutoModel

from hf_ctxmodels.compression.distillation import Teacher
from hf_ctxmodels.compression.distillation.augmentation import Augmenter, Masking, Substitution
from hf_ctxmodels.conversion.word_vectors import WordVectors
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.console import format_count, print_status, progress_bar
from hf_ctxmodels.core.constants import MAX_SEED
from hf_ctxmodels.core.devices import DeviceArguments
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, check_range, flag, parse_choices
from hf_ctxmodels.core.output_files import (
    check_output_directory,
    check_output_file,
    replacing_files,
    write_text_file,
)
from hf_ctxmodels.data.cleaning import check_text_suffix, write_documents
from hf_ctxmodels.data.document_sources import document_files, load_documents
from hf_ctxmodels.data.phrase_mining import extract_entities, find_phrases, join_phrases, score_phrases
from hf_ctxmodels.data.table_files import read_conll, read_table
from hf_ctxmodels.data.text_files import read_lines
from hf_ctxmodels.downstream.tasks.base import get_texts
from hf_ctxmodels.downstream.tasks.question_answering import read_squad
from hf_ctxmodels.downstream.tasks.seq2seq_pairs import PairLimits, question_pairs, split_questions, summary_pairs
from hf_ctxmodels.evaluation import WordSpace
from hf_ctxmodels.training.model_loading import load_config, load_model, load_tokenizer


@dataclass
class PairArguments:
    """Input and output."""

    kind: Literal["summaries", "questions"] = flag(
        REQUIRED,
        "summaries: the first sentence or title of an article from its other sentences; questions: a question from its "
        "answer and the sentence of the context that contains it.",
    )
    dataset: list[str] = flag(
        REQUIRED, "summaries: articles, in any format of `pretrain --dataset`; questions: .json files in SQuAD format."
    )
    output_dir: str = flag(REQUIRED, "Output directory.")
    validation_fraction: float = flag(
        0.1,
        "Fraction of validation articles (the articles that pretrain holds out), or of validation contexts (the last).",
    )
    min_target_words: int = flag(
        PairLimits.min_target, "Shortest target in words; pairs with a shorter one are skipped."
    )
    max_target_words: int = flag(PairLimits.max_target, "Longest target in words; pairs with a longer one are skipped.")
    min_source_words: int = flag(
        PairLimits.min_source, "Shortest source of a summary in words; shorter ones are skipped."
    )
    max_source_words: int = flag(
        PairLimits.max_source,
        "Longest source in words; summaries are truncated at a sentence, longer questions are skipped.",
    )
    overwrite: bool = flag(False, "Replace the files in --output_dir.")


def pairs() -> None:
    """Make source-target pairs for `finetune seq2seq`: summaries of articles, or questions from files in SQuAD format.

        hf-ctxmodels data pairs --kind summaries --dataset news.txt.gz --output_dir data/summaries
        hf-ctxmodels data pairs --kind questions --dataset xquad.en.json.gz --output_dir data/questions

    Each split is written as a table (train.jsonl, validation.jsonl), and as two files of lines (train.source.txt,
    train.target.txt, ...) for `data tokenizer --translations` and `generate`.
    """
    (arguments,) = parse_arguments(PairArguments, description=getdoc(pairs))
    splits, suffixes = ("train", "validation"), (".jsonl", ".source.txt", ".target.txt")
    names = [f"{split}{suffix}" for split in splits for suffix in suffixes]
    check_output_directory(arguments.output_dir, names, flag="--output_dir", overwrite=arguments.overwrite)
    limit_names = ("min_target_words", "max_target_words", "min_source_words", "max_source_words")
    limits = PairLimits(*(getattr(arguments, name) for name in limit_names))
    pairs_by_split: Iterable[list[tuple[str, str]]]
    if arguments.kind == "summaries":
        documents = load_documents(*arguments.dataset, skip_empty_documents=True).split(arguments.validation_fraction)
        pairs_by_split = [list(summary_pairs(articles, limits)) for articles in documents]
    else:
        questions = [question for file in arguments.dataset for question in read_squad(file)]
        question_splits = split_questions(questions, arguments.validation_fraction)
        pairs_by_split = [list(question_pairs(split, limits)) for split in question_splits]
    training, validation = pairs_by_split
    if not training or not validation:
        raise CtxError(
            f"{len(training)} pairs for training and {len(validation)} for validation.",
            location=" ".join(arguments.dataset),
            hint="use more data or other length limits: --min_source_words, --max_target_words, ...",
        )
    with replacing_files(arguments.output_dir) as folder:
        for split, split_pairs in zip(splits, (training, validation)):
            sources, targets = zip(*split_pairs, strict=True)
            table = [json.dumps({"source": pair[0], "target": pair[1]}, ensure_ascii=False) for pair in split_pairs]
            for suffix, lines in zip(suffixes, (table, sources, targets)):
                text = "".join(f"{line}\n" for line in lines)
                (folder / f"{split}{suffix}").write_text(text, encoding="utf-8")
    print(f"{len(training)} pairs for training and {len(validation)} for validation in {arguments.output_dir}")
    for name, text in zip(("source", "target"), validation[0], strict=True):
        print(f"{name}: {text[:200]}")


@dataclass
class UnitArguments:
    """Input and output."""

    output: str = flag(REQUIRED, "File to write, with one unit per line, the most frequent first.")
    dataset: list[str] = flag(
        (), "Text to find phrases in by mutual information, in any format of `pretrain --dataset`."
    )
    validation_fraction: float = flag(
        0.0, "Fraction of held-out documents to skip; pretrain holds out the same documents."
    )
    gazetteers: list[str] = flag((), "Lists of phrases or entities, one per line; single words are skipped.")
    entities: list[str] = flag((), "CoNLL files with entities as BIO or IOB1 tags in the last column.")
    min_count: int = flag(20, "Minimum number of occurrences of a phrase.")
    min_information: float = flag(3.0, "Minimum pointwise mutual information of a phrase, in nats.")
    max_words: int = flag(4, "Longest phrase in words.")
    overwrite: bool = flag(False, "Replace --output if it exists.")


def units() -> None:
    """Write a file of phrases and entities, one per line, for objectives that mask units.

    hf-ctxmodels data units --dataset books.txt --output phrases.txt
    hf-ctxmodels data units --entities train.conll --gazetteers names.txt phrases.txt --output entities.txt
    hf-ctxmodels pretrain --recipe ernie_learning_2 --objective unit-mlm+pairs:units=phrases.txt ...
    """
    (arguments,) = parse_arguments(UnitArguments, description=getdoc(units))
    inputs = (*document_files(arguments.dataset), *arguments.gazetteers, *arguments.entities)
    check_output_file(arguments.output, flag="--output", overwrite=arguments.overwrite, inputs=inputs)
    counts = Counter[str]()
    if arguments.dataset:
        documents = load_documents(*arguments.dataset, skip_empty_documents=True)
        if arguments.validation_fraction:
            documents, _ = documents.split(arguments.validation_fraction)
        limits = ("min_count", "min_information", "max_words")
        phrases = find_phrases(documents, **{name: getattr(arguments, name) for name in limits})
        print_status(f"{len(phrases)} phrases in {documents.name}")
        counts.update(phrases)
    for file in arguments.gazetteers:
        counts.update(" ".join(line.split()) for line in read_lines(file) if len(line.split()) > 1)
    for file in arguments.entities:
        counts.update(extract_entities(read_conll(file)))
    if not counts:
        raise CtxError(
            "There is no unit of two or more words.",
            hint="pass --dataset, --gazetteers or --entities, or lower --min_count and --min_information.",
        )
    most_frequent = [unit for unit, _ in counts.most_common()]
    write_text_file(arguments.output, "".join(f"{unit}\n" for unit in most_frequent))
    print(f"{format_count(len(counts), 'unit')} in {arguments.output}, such as: {', '.join(most_frequent[:8])}")


@dataclass
class PhraseArguments:
    """Input and output."""

    dataset: list[str] = flag(REQUIRED, "Text, in any format of `pretrain --dataset`.")
    output: str = flag(REQUIRED, "File to write: .txt or .jsonl, plain or with .gz or .zst.")
    thresholds: list[float] = flag(
        (20.0, 10.0), "Lowest score of a phrase in each pass; a pass also joins phrases of the passes before it."
    )
    min_count: int = flag(5, "Discount of rare pairs: a pair that occurs as often or less is not a phrase.")
    overwrite: bool = flag(False, "Replace --output if it exists.")

    def __post_init__(self) -> None:
        check_range(self, "min_count", at_least=1)
        if not self.thresholds or min(self.thresholds) < 0 or self.thresholds != sorted(self.thresholds, reverse=True):
            raise CtxError(
                f"Expected thresholds of at least 0 that decrease, got {' '.join(map(str, self.thresholds))}.",
                location="--thresholds",
                hint="use, for example, 20 10.",
            )


def phrases() -> None:
    """Join the words of phrases with underscores, to train word2vec vectors of phrases (Mikolov et al. 2013b).

    hf-ctxmodels data phrases --dataset news.txt.gz --output news.phrases.txt.gz --thresholds 20 10

    Two words are a phrase if (count(a b) - min_count) / (count(a) count(b)), times the number of distinct words and
    pairs, is above the threshold (section 4 of the paper, scaled as in gensim). Several passes find longer phrases.
    """
    (arguments,) = parse_arguments(PhraseArguments, description=getdoc(phrases))
    check_text_suffix(arguments.output)
    inputs = document_files(arguments.dataset)
    check_output_file(arguments.output, flag="--output", overwrite=arguments.overwrite, inputs=inputs)
    documents = load_documents(*arguments.dataset, skip_empty_documents=True)
    passes: list[dict[tuple[str, str], float]] = []

    def joined(description: str) -> Iterator[list[str]]:
        """The lines of each document, with the phrases of all passes joined."""
        for document in progress_bar(documents.paragraphs(), description, unit="documents"):
            for accepted in passes:
                document = [join_phrases(text, accepted) for text in document]
            yield document

    for number, threshold in enumerate(arguments.thresholds, start=1):
        lines = (line for document in joined(f"pass {number}") for line in document)
        accepted = score_phrases(lines, min_count=arguments.min_count, threshold=threshold)
        passes.append(accepted)
        best = sorted(accepted, key=lambda pair: -accepted[pair])[:8]
        examples = f", such as: {', '.join(map('_'.join, best))}" if best else ""
        print(f"pass {number}: {format_count(len(accepted), 'phrase')} with a score above {threshold:g}{examples}")
    if not any(passes):
        raise CtxError("There is no phrase.", location="--thresholds", hint="lower --thresholds or --min_count.")
    write_documents(arguments.output, joined("writing"))
    print(f"text with joined phrases in {arguments.output}")


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
    input: str = flag(REQUIRED, "Examples: .csv, .tsv, .txt (tab-separated) or .jsonl, optionally .gz or .zst.")
    output: str = flag(REQUIRED, "JSONL file for the examples and their copies.")
    text_columns: str = flag("text", "Column of the text, or two for pairs, separated by a comma.")
    label_column: str = flag("label", "Column of the label.")
    rule: SubstitutionOptions | MaskingOptions = flag(
        "substitution", "Augmentation rule.", {"substitution": SubstitutionOptions, "masking": MaskingOptions}
    )
    copies: int = flag(20, "Copies of each example; duplicates are dropped.")
    seed: int = flag(0, "Random seed.")
    overwrite: bool = flag(False, "Replace the file if it exists.")

    def __post_init__(self) -> None:
        parse_choices(self)
        check_range(self, "copies", at_least=1)
        check_range(self, "seed", at_least=0, at_most=MAX_SEED)


def augment() -> None:
    """Augment the training examples of a task for distillation.

        hf-ctxmodels data augment --model runs/bert --rule substitution:vectors=runs/glove --input train.tsv \\
            --text_columns sentence --copies 20 --output augmented.jsonl

    The output has each example and changed copies with its label; distillation replaces the labels of the copies by the
    predictions of the teacher. By default words of one token are substituted by candidates of a masked language model,
    and with `vectors` other words by their nearest word vectors (TinyBERT: 10 copies for MNLI and QQP, 20 for SST-2 and
    QNLI, 30 for CoLA, MRPC, STS-B and RTE). `--rule masking` masks words and samples n-grams (Tang et al. 2019), with
    the tokenizer of --model alone.
    """
    arguments, placement = parse_arguments(AugmentationArguments, DeviceArguments, description=getdoc(augment))
    check_output_file(arguments.output, flag="--output", overwrite=arguments.overwrite, inputs=[arguments.input])
    columns = [column.strip() for column in arguments.text_columns.split(",")]
    rows = read_table(arguments.input, [*columns, arguments.label_column])
    augmenter = Augmenter(_make_rule(arguments, placement), arguments.copies, arguments.seed)
    lines = []
    for index, row in enumerate(progress_bar(rows, "augmenting", unit="examples")):
        label = {arguments.label_column: row.values[arguments.label_column]}
        for texts in augmenter.augment(get_texts(row, columns), index):
            lines.append(json.dumps(dict(zip(columns, texts, strict=True)) | label, ensure_ascii=False) + "\n")
    write_text_file(arguments.output, "".join(lines))
    print(f"{format_count(len(rows), 'example')} augmented to {len(lines)}, in {arguments.output}")


def _make_rule(arguments: AugmentationArguments, placement: DeviceArguments) -> Substitution | Masking:
    """The augmentation rule of the flags."""
    rule = arguments.rule
    if isinstance(rule, MaskingOptions):
        tokenizer = load_tokenizer(arguments.model)
        if tokenizer.mask_token is None:
            raise CtxError(f"{type(tokenizer).__name__} has no mask token.", location=f"--model {arguments.model}")
        return Masking(tokenizer, rule.mask_probability, rule.ngram_probability)
    space = None
    if rule.vectors is not None:
        vectors: Any = load_model(rule.vectors, AutoModel.__name__, load_config(rule.vectors))
        space = WordSpace(WordVectors.from_model(vectors, load_tokenizer(rule.vectors)))

    def nearest(word: str, number: int) -> list[str]:
        if space is None or word not in space:
            return []
        return [neighbor for neighbor, _ in space.most_similar(word, number)]

    checkpoint = Teacher.open(arguments.model)
    model = placement.place(checkpoint.load("AutoModelForMaskedLM"))
    return Substitution(model, checkpoint.tokenizer, nearest, number=rule.candidates, probability=rule.probability)
