"""Subcommands of `hf-ctxmodels evaluate`."""

import json
import re
from dataclasses import dataclass
from functools import partial
from inspect import getdoc
from pathlib import Path
from typing import Any, get_args

from transformers import AutoModel

from hf_ctxmodels.analysis.senses import context_text, find_occurrences, nearest_occurrences
from hf_ctxmodels.analysis.sentences import read_sentences
from hf_ctxmodels.architectures.sentence_encoder import encode_sentences
from hf_ctxmodels.architectures.word_encoder import WordEncoder
from hf_ctxmodels.conversion.word_vectors import WordVectors
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.console import format_count
from hf_ctxmodels.core.constants import MAX_SEED
from hf_ctxmodels.core.devices import DeviceArguments, select_device
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, check_range, flag, non_default_fields
from hf_ctxmodels.core.output_files import check_output_file, write_text_file
from hf_ctxmodels.data.document_sources import document_files, load_documents
from hf_ctxmodels.data.files import split_columns
from hf_ctxmodels.data.text_files import read_lines
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import load_model_and_tokenizer
from hf_ctxmodels.downstream.finetuning.forgetting import PretrainingEvaluation, measure_forgetting
from hf_ctxmodels.downstream.tasks import SequenceClassification, TaskArguments
from hf_ctxmodels.downstream.tasks.languages import split_language
from hf_ctxmodels.downstream.tasks.metrics import metric_range, range_note
from hf_ctxmodels.evaluation import (
    Criterion,
    Encode,
    WordSpace,
    classification,
    evaluate_analogies,
    evaluate_pairs,
    evaluate_similarity,
    read_analogies,
    read_pairs,
    read_similarities,
    relatedness,
    retrieval,
    similarity,
    total_result,
    unigram_scorer,
)
from hf_ctxmodels.evaluation.cooccurrence_ratios import cooccurrence_probabilities, learned_ratios
from hf_ctxmodels.evaluation.scoring import PLLMetric, load_language_model
from hf_ctxmodels.evaluation.sentence_tests import read_labeled_splits, read_rated_splits, read_test_pairs
from hf_ctxmodels.inference import Predictor, score, score_ensemble
from hf_ctxmodels.layers.pooling import Pooling
from hf_ctxmodels.training.model_loading import check_sources, load_config, load_model, load_tokenizer


@dataclass
class WordArguments:
    """Model and tests."""

    model: str = flag(REQUIRED, "Checkpoint directory or Hub id of a model of word vectors.")
    similarity: list[str] = flag((), "Files with two words and a gold score per line, separated by tabs.")
    analogies: list[str] = flag((), "Files with four words per line, in sections `: name`.")
    most_frequent: int | None = flag(
        None, "Restrict the candidate answers to the N most frequent words; by default all words."
    )
    near: list[str] = flag((), "Words whose nearest neighbors are printed.")
    contexts: list[str] = flag(
        (),
        "Sentences, as --text of `analyze similarity`: the neighbors of --near are words in context, of any model.",
        conflicts=("similarity", "analogies", "analogy", "most_frequent", "ratios"),
    )
    layer: int = flag(-1, "Layer of --contexts; 0 is the output of the embeddings, -1 the last layer.")
    occurrences: int = flag(3, "Occurrences of each word of --near in --contexts whose neighbors are printed.")
    analogy: list[str] = flag((), "Three words a b c: print the words that are to c as b is to a.")
    ratios: list[str] = flag(
        (), "WORD,WORD PROBE...: print P(probe | first) / P(probe | second) as learned by GloVe (its paper, table 1)."
    )
    ratio_text: list[str] = flag(
        (), "Text, in any format of `pretrain --dataset`, in which the probabilities of --ratios are counted."
    )

    def __post_init__(self) -> None:
        check_range(self, "most_frequent", "occurrences", at_least=1)
        require_test(self, "similarity", "analogies", "near", "analogy", "ratios")
        if not self.contexts and (unused := sorted(non_default_fields(self) & {"layer", "occurrences"})):
            raise CtxError(
                f"{' and '.join(f'--{name}' for name in unused)} can be used only with --contexts.",
                location=" ".join(f"--{name}" for name in unused),
                hint="add --contexts FILE, or remove these flags.",
            )


def require_test(arguments: object, *names: str) -> None:
    """Raise CtxError if none of the flags is set."""
    if not any(getattr(arguments, name) for name in names):
        raise CtxError("There is nothing to evaluate.", hint=f"add one or more of --{', --'.join(names)}.")


def words() -> None:
    r"""Evaluate the word vectors of a model, or print nearest neighbors, analogies and co-occurrence ratios.

        hf-ctxmodels evaluate words --model runs/word2vec --similarity EN-WS-353-ALL.txt EN-SIMLEX-999.txt \
            --analogies questions-words.txt.gz --most_frequent 30000
        hf-ctxmodels evaluate words --model runs/word2vec --near king --analogy man king woman
        hf-ctxmodels evaluate words --model runs/bert --contexts corpus.txt --near bank
        hf-ctxmodels evaluate words --model runs/glove --ratios ice,steam solid gas water --ratio_text corpus.txt
    """
    arguments, placement = parse_arguments(WordArguments, (DeviceArguments, ["device"]), description=getdoc(words))
    if arguments.contexts:
        print_nearest_in_context(arguments, placement)
        return
    if len(arguments.analogy) not in (0, 3):
        raise CtxError(
            f"Expected three words for an analogy, got {len(arguments.analogy)}.",
            location="--analogy",
            hint="use, for example, man king woman.",
        )
    model = load_model(arguments.model, AutoModel.__name__, load_config(arguments.model))
    tokenizer = load_tokenizer(arguments.model)
    vectors = WordVectors.from_model(model, tokenizer)
    space = WordSpace(vectors, arguments.most_frequent, select_device(placement.device))
    for name in ("near", "analogy"):
        if missing := [word for word in getattr(arguments, name) if word not in space]:
            raise CtxError(
                f"No vector of {', '.join(map(repr, missing))}.",
                location=f"--{name}",
                hint="use words of the model's vocabulary.",
            )
    for path in arguments.similarity:
        result = evaluate_similarity(space, read_similarities(path))
        print(f"{Path(path).name:<28} spearman {result.spearman:.4f}  {result.covered} of {result.pairs} pairs")
    if arguments.similarity:
        print(range_note("spearman"))
    for path in arguments.analogies:
        answers = evaluate_analogies(space, read_analogies(path))
        for name, (correct, covered, total) in [*answers.sections.items(), ("all", answers.total)]:
            accuracy = f"{correct / covered:.1%}" if covered else "-"
            print(f"{name:<28} accuracy {accuracy:>6}  {covered} of {total} questions")
    for word in arguments.near:
        print(f"{word}: " + ", ".join(f"{neighbor} {cosine:.3f}" for neighbor, cosine in space.most_similar(word)))
    if arguments.analogy:
        a, b, c = arguments.analogy
        print(f"{a} : {b} = {c} : " + ", ".join(f"{d} {cosine:.3f}" for d, cosine in space.analogy(a, b, c)))
    if arguments.ratios or arguments.ratio_text:
        print_cooccurrence_ratios(arguments, model, tokenizer)


def print_cooccurrence_ratios(arguments: WordArguments, model: Any, tokenizer: Any) -> None:
    """Print for each probe word the ratio of its co-occurrence probabilities: learned, and counted in a text."""
    pair, probes = arguments.ratios[:1], arguments.ratios[1:]
    words = [word for value in pair for word in value.split(",")]
    if len(words) != 2 or not probes:
        raise CtxError(
            f"Expected two words and probe words, got {' '.join(arguments.ratios)!r}.",
            location="--ratios",
            hint="use, for example, ice,steam solid gas water fashion.",
        )
    columns: list[tuple[str, str, list[float]]] = []
    if arguments.ratio_text:
        documents = load_documents(*arguments.ratio_text, skip_empty_documents=True)
        first, second = cooccurrence_probabilities(tokenizer, documents, words, probes)
        columns += [(f"P(k|{word})", ".3e", row.tolist()) for word, row in zip(words, (first, second), strict=True)]
        columns.append(("ratio", ".4g", (first / second).tolist()))
    if getattr(model, "context_embeddings", None) is not None or not columns:
        columns.append(("learned ratio", ".4g", learned_ratios(model, tokenizer, words, probes).tolist()))
    print(f"{'k':<16}" + "".join(f"{name:>16}" for name, _, _ in columns))
    for row, probe in enumerate(probes):
        print(f"{probe:<16}" + "".join(f"{values[row]:>16{form}}" for _, form, values in columns))


def print_nearest_in_context(arguments: WordArguments, placement: DeviceArguments) -> None:
    """Print the nearest words in context of some occurrences of each word."""
    sentences = read_sentences(arguments.contexts)
    queries = [query for word in arguments.near for query in find_occurrences(sentences, word, arguments.occurrences)]
    if not queries:
        raise CtxError("No word is given.", location="--contexts", hint="add, for example, --near bank.")
    model, tokenizer = load_model_and_tokenizer(arguments.model, AutoModel.__name__)
    placement.place(model)
    corpus = WordEncoder(model, tokenizer, layers=[arguments.layer]).encode_corpus(sentences)
    for query, neighbors in zip(queries, nearest_occurrences(corpus, queries), strict=True):
        print(context_text(corpus.sentences[query.sentence], query))
        for neighbor, cosine in neighbors:
            print(f"  {cosine:.3f}  {context_text(corpus.sentences[neighbor.sentence], neighbor)}")


_TABLES_PER_VALUE = {"similarity": 1, "relatedness": 2, "classification": 2}  # by flag


@dataclass
class SentenceArguments:
    """Model and tests."""

    model: str = flag(REQUIRED, "Checkpoint directory or Hub id.")
    pooling: Pooling | None = flag(None, "Pooling of the hidden states; by default the pooling of the model.")
    similarity: list[str] = flag(
        (),
        "FILE=FIRST,SECOND,SCORE: a table, or a dataset such as mteb/stsbenchmark-sts:split=test, and its columns of "
        "two texts and a gold score.",
    )
    relatedness: list[str] = flag((), "TRAIN,TEST=FIRST,SECOND,SCORE: tables for a learned regression of the score.")
    classification: list[str] = flag(
        (), "TRAIN,TEST=TEXT,LABEL or TRAIN,TEST=FIRST,SECOND,LABEL: tables and their columns."
    )
    retrieval: list[str] = flag(
        (), "FILE,FILE: texts and their translations, line by line; or CODE=FILE,CODE=FILE for language embeddings."
    )
    batch_size: int = flag(64, "Sentences per batch.")
    seed: int = flag(0, "Seed of the validation split that selects the regularization.")

    def __post_init__(self) -> None:
        check_range(self, "batch_size", at_least=1)
        check_range(self, "seed", at_least=0, at_most=MAX_SEED)
        require_test(self, "similarity", "relatedness", "classification", "retrieval")


def sentences() -> None:
    r"""Evaluate sentence vectors without fine-tuning: similarity, linear probes, retrieval of translations.

        hf-ctxmodels evaluate sentences --model runs/infersent --similarity stsb-en-test.csv=1,2,3 \
            --classification SST-2/train.tsv.gz,SST-2/test.tsv=sentence,label
        hf-ctxmodels evaluate sentences --model runs/laser --retrieval verses.en.txt,verses.de.txt
        hf-ctxmodels evaluate sentences --model runs/xlm --pooling mean --retrieval en=verses.en.txt,de=verses.de.txt
    """
    arguments, placement = parse_arguments(SentenceArguments, DeviceArguments, description=getdoc(sentences))
    tables = {name: split_tables(name, getattr(arguments, name)) for name in _TABLES_PER_VALUE}
    # all files are read and checked before the model is loaded
    rated = [(Path(file).name, read_test_pairs(file, columns)) for (file,), columns in tables["similarity"]]
    related = [(test, read_rated_splits(train, test, columns)) for (train, test), columns in tables["relatedness"]]
    labeled = [(test, read_labeled_splits(train, test, columns)) for (train, test), columns in tables["classification"]]
    translations = [read_translations(text) for text in arguments.retrieval]
    model, tokenizer = load_model_and_tokenizer(arguments.model, AutoModel.__name__)
    if not hasattr(tokenizer, "language") and any(language for sides in translations for language, _, _ in sides):
        raise CtxError(f"{type(tokenizer).__name__} has no languages.", location="--retrieval", hint="omit LANGUAGE=.")
    placement.place(model)
    encode = partial(encode_sentences, model, tokenizer, pooling=arguments.pooling, batch_size=arguments.batch_size)

    correlations = [(name, similarity(encode, pairs)) for name, pairs in rated]
    correlations += [(file, relatedness(encode, train, test, arguments.seed)) for file, (train, test) in related]
    for name, result in correlations:
        print(f"{name:<44} spearman {result.spearman:.4f}  pearson {result.pearson:.4f}  {result.pairs} pairs")
    metrics = ["spearman", "pearson"] if correlations else []
    for file, (train, test) in labeled:
        probe = classification(encode, train, test, arguments.seed)
        print(f"{file:<44} accuracy {probe.accuracy:.4f}  majority {probe.majority:.4f}  {probe.examples[1]} examples")
    for sides in translations:
        print("\n".join(retrieval_lines(encode, tokenizer, sides)))
    metrics += ["accuracy"] if arguments.classification else []
    metrics += get_args(Criterion) if arguments.retrieval else []
    if metrics:
        print(range_note(*metrics))


def split_tables(flag_name: str, texts: list[str]) -> list[tuple[list[str], list[str]]]:
    """Files and columns of the values `FILE,...=COLUMN,...` of a flag."""
    tables = []
    for text in texts:
        source, columns = split_columns(text)
        # a comma before an option of a dataset does not separate tables
        files = [source] if _TABLES_PER_VALUE[flag_name] == 1 else re.split(r",(?!\w+=)", source)
        if len(files) != _TABLES_PER_VALUE[flag_name] or not columns:
            raise CtxError(f"Invalid value {text!r}.", location=f"--{flag_name}", hint="see --help for the format.")
        tables.append((files, columns))
    return tables


def read_translations(text: str) -> list[tuple[str, str, list[str]]]:
    """Language, file and sentences of both sides of a value of `--retrieval`; the language is empty without one."""
    sides = [split_language(source) for source in text.split(",")]
    if len(sides) != 2 or len({bool(language) for language, _ in sides}) != 1:
        raise CtxError(f"Invalid value {text!r}.", location="--retrieval", hint="see --help for the format.")
    translations = [(language, file, [line.strip() for line in read_lines(file)]) for language, file in sides]
    for _, file, sentences in translations:
        if "" in sentences:
            raise CtxError(
                "The line is blank; expected a sentence.",
                location=f"{file}:{sentences.index('') + 1}",
                hint="remove the line and its translation.",
            )
    numbers = [len(sentences) for _, _, sentences in translations]
    if numbers[0] != numbers[1] or not numbers[0]:
        raise CtxError(
            f"Got {numbers[0]} sentences and {numbers[1]} translations.",
            location=f"--retrieval {text}",
            hint="provide one translation per sentence.",
        )
    return translations


def retrieval_lines(encode: Encode, tokenizer: Any, sides: list[tuple[str, str, list[str]]]) -> list[str]:
    """The accuracies of the retrieval of translations in both directions; `sides` from `read_translations`."""
    names, vectors = [], []
    for language, file, sentences in sides:
        if language:
            tokenizer.language = language
        names.append(Path(file).name)
        vectors.append(encode(sentences))
    lines = []
    for first, second in ((0, 1), (1, 0)):
        scores = {name: retrieval(vectors[first], vectors[second], name) for name in get_args(Criterion)}
        accuracies = "  ".join(f"{name} {accuracy:.4f}" for name, accuracy in scores.items())
        direction = f"{names[first]} -> {names[second]}"
        lines.append(f"{direction:<44} {accuracies}  {len(vectors[0])} pairs")
    return lines


@dataclass
class PairArguments:
    """Model and minimal pairs."""

    model: str = flag(REQUIRED, "Checkpoint directory or Hub id of a language model.")
    pairs: list[str] = flag(
        REQUIRED,
        "Files of BLiMP (JSONL or Parquet with sentence_good and sentence_bad), datasets with these columns, such as "
        "nyu-mll/blimp:config=NAME, or files of Zorro (.txt).",
    )
    unigram_text: list[str] = flag(REQUIRED, "Text files for the token frequencies of the unigram baseline.")
    max_pairs: int | None = flag(None, "Use the first N pairs of each file; by default all.")
    pll_metric: PLLMetric = flag(
        "original",
        "Score of masked language models: mask one token at a time, or also the later tokens of its word "
        "(within_word_l2r, Kauf & Ivanova 2023).",
    )
    batch_size: int = flag(64, "Sequences per batch; a masked language model needs one per token.")

    def __post_init__(self) -> None:
        check_range(self, "batch_size", "max_pairs", at_least=1)


def pairs() -> None:
    """Evaluate on minimal pairs whether a language model prefers the acceptable sentence.

        hf-ctxmodels evaluate pairs --model runs/bert --pairs blimp/*.jsonl.gz --unigram_text news.txt.gz

    The baseline is a unigram model of the tokens in --unigram_text, preferably the training text of the model: it
    ignores the context.
    """
    arguments, placement = parse_arguments(PairArguments, DeviceArguments, description=getdoc(pairs))
    minimal_pairs = [pair for path in arguments.pairs for pair in read_pairs(path)[: arguments.max_pairs]]
    for path in arguments.unigram_text:
        if not any(line.strip() for line in read_lines(path)):
            hint = "use a file with text, such as the training text of the model."
            raise CtxError("The file has no text.", location=f"--unigram_text {path}", hint=hint)
    model, tokenizer = load_language_model(arguments.model)
    placement.place(model)
    texts = (line for path in arguments.unigram_text for line in read_lines(path))
    unigrams = evaluate_pairs(minimal_pairs, unigram_scorer(tokenizer, texts))
    score_texts = partial(score, model, tokenizer, batch_size=arguments.batch_size, pll_metric=arguments.pll_metric)
    results = evaluate_pairs(minimal_pairs, lambda texts: [text.log_probability for text in score_texts(texts)])
    rows = [(name, result, unigrams[name]) for name, result in results.items()]
    for name, result, unigram in [*rows, ("all", total_result(results.values()), total_result(unigrams.values()))]:
        print(
            f"{name:<36} accuracy {result.accuracy:.4f}  unigram {unigram.accuracy:.4f}  "
            f"difference {result.accuracy - unigram.accuracy:+.4f}  {result.pairs} pairs"
        )
    print(range_note("accuracy", "unigram"))


@dataclass(kw_only=True)
class PretrainingTextArguments:
    """Text."""

    text: list[str] = flag(REQUIRED, "Documents, in any format of `pretrain --dataset`, preferably unseen.")
    validation_fraction: float | None = flag(
        None, "Use only the validation documents of pretrain with this fraction and the same files."
    )
    max_length: int | None = flag(None, "Maximum length in tokens; by default the length of pretraining.")
    batch_size: int = flag(32, "Examples per batch.")

    def __post_init__(self) -> None:
        check_range(self, "batch_size", at_least=1)

    def open(
        self, checkpoint: str, placement: DeviceArguments, options: dict[str, str] | None = None
    ) -> PretrainingEvaluation:
        """The evaluation of a checkpoint on the text; `options` are options of the objective."""
        evaluation = PretrainingEvaluation.open(
            checkpoint, *self.text, max_length=self.max_length, held_out=self.validation_fraction, options=options
        )
        placement.place(evaluation.model)
        return evaluation


@dataclass(kw_only=True)
class PretrainingLossArguments(PretrainingTextArguments):
    """Checkpoint and text."""

    model: str = flag(REQUIRED, "Pretrained checkpoint with its head: directory or Hub id.")
    objective_options: list[str] = flag(
        (), "Options of the objective as name=value that differ from pretraining; an unknown name lists them."
    )


def pretraining() -> None:
    """Evaluate a pretrained model by its pretraining objective, also with other options than in pretraining.

        hf-ctxmodels evaluate pretraining --model runs/bert --text held_out.txt
        hf-ctxmodels evaluate pretraining --model runs/albert --text held_out.txt --objective_options sentence_task=next

    The second line tests a model of sentence-order prediction on next-sentence prediction (ALBERT, table 5): class 0 is
    a coherent pair in both tasks.
    """
    arguments, placement = parse_arguments(
        PretrainingLossArguments, DeviceArguments, description=getdoc(pretraining), essential=("model", "text")
    )
    options = dict(text.partition("=")[::2] for text in arguments.objective_options)
    evaluation = arguments.open(arguments.model, placement, options)
    results = evaluation.loss(arguments.batch_size)
    print(f"{evaluation.name}, {format_count(len(evaluation.examples), 'example')}")
    for name, value in results.items():
        metric = name.removeprefix("eval_")
        print(f"{metric:<28}{value:>12.4f}  {metric_range(metric)}")


@dataclass(kw_only=True)
class ForgettingArguments(PretrainingTextArguments):
    """Checkpoints and text."""

    pretrained: str = flag(REQUIRED, "Pretrained checkpoint with its head: directory or Hub id.")
    finetuned: str = flag(REQUIRED, "Checkpoint fine-tuned from it: directory or Hub id.")
    output_file: str | None = flag(None, "JSON file for the results.")
    overwrite: bool = flag(False, "Replace --output_file.")


def forgetting() -> None:
    """Measure forgetting in fine-tuning: the pretraining loss of the fine-tuned encoder, and how far its weights moved.

        hf-ctxmodels evaluate forgetting --pretrained runs/bert --finetuned runs/sst2 --text held_out.txt

    The objective, its options and the maximum length are read from the pretrained checkpoint.
    """
    arguments, placement = parse_arguments(
        ForgettingArguments,
        DeviceArguments,
        description=getdoc(forgetting),
        essential=("pretrained", "finetuned", "text"),
    )
    if arguments.output_file is not None:
        inputs = document_files(arguments.text)
        check_output_file(arguments.output_file, flag="--output_file", overwrite=arguments.overwrite, inputs=inputs)
    check_sources([arguments.pretrained, arguments.finetuned])
    evaluation = arguments.open(arguments.pretrained, placement)
    results = measure_forgetting(evaluation, arguments.finetuned, arguments.batch_size)
    if arguments.output_file is not None:
        write_text_file(arguments.output_file, json.dumps(results, indent=2) + "\n")
    print(f"{results['objective']}, {format_count(results['rows'], 'example')}")
    print(f"{'metric':<28}{'before':>12}{'after':>12}  range")
    for name, value in results["before"].items():
        metric = name.removeprefix("eval_")
        print(f"{metric:<28}{value:>12.4f}{results['after'][name]:>12.4f}  {metric_range(metric)}")
    print(f"{'weights':<28}{'distance':>12}{'relative':>12}")
    for module, distance in results["distances"].items():
        print(f"{module:<28}{distance['distance']:>12.4f}{distance['relative']:>12.4f}")


@dataclass
class EnsembleArguments:
    """Models and data."""

    models: list[str] = flag(REQUIRED, "Directories or Hub ids of text classifiers, of any families.")
    validation_file: str = flag(REQUIRED, "Labeled examples, as --validation_file of finetune.")
    max_length: int | None = flag(None, "Longest input in tokens; by default as in the fine-tuning of each model.")
    batch_size: int = flag(32, "Examples per batch.")

    def __post_init__(self) -> None:
        check_range(self, "max_length", "batch_size", at_least=1)


def ensemble() -> None:
    """Classify texts by the mean of the probabilities of several models, and print the metrics.

    hf-ctxmodels evaluate ensemble --models runs/forward runs/backward --validation_file test.tsv
    """
    task_section = (TaskArguments, ("text_columns", "label_column", "both_orders"))
    arguments, task_arguments, placement = parse_arguments(
        EnsembleArguments, task_section, DeviceArguments, description=getdoc(ensemble)
    )
    check_sources(arguments.models)
    examples = SequenceClassification(task_arguments).read(arguments.validation_file, "validation")
    classifiers = [
        Predictor.open(source, task_arguments, task=SequenceClassification.name, max_length=arguments.max_length)
        for source in arguments.models
    ]
    for classifier in classifiers:
        placement.place(classifier.model)
    scores = score_ensemble(classifiers, examples, arguments.batch_size)
    width = max(map(len, [*arguments.models, "ensemble"]))
    for name, metrics in zip([*arguments.models, "ensemble"], [*scores.members, scores.ensemble], strict=True):
        print(f"{name:<{width}}  " + "  ".join(f"{metric} {value:.4f}" for metric, value in metrics.items()))
    print(f"{format_count(len(examples), 'example')}; {range_note(*scores.ensemble)}")
