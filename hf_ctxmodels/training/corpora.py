"""Training text of a run: flags, the objective, and its examples, in memory, prepared, streamed, or in the cache."""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HOME
from joblib import cpu_count
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.console import format_count, format_number, is_main_process, print_status, progress_bar
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range, did_you_mean, flag, split_choice, typed_options
from hf_ctxmodels.core.loading import describe_differences, file_digest
from hf_ctxmodels.core.locks import wait_for_lock
from hf_ctxmodels.core.output_files import replacing
from hf_ctxmodels.core.paths import is_url, local_path
from hf_ctxmodels.data import DataArguments, ExampleSet, build_training_set
from hf_ctxmodels.data.control_codes import add_control_codes
from hf_ctxmodels.data.document_sources import NONE, document_files
from hf_ctxmodels.data.documents import Documents
from hf_ctxmodels.data.examples import Example
from hf_ctxmodels.data.files import file_errors, file_info, open_file
from hf_ctxmodels.data.folders import RemoteFolder
from hf_ctxmodels.data.preparation import Preparation, examples_of, held_out_errors, text_parts
from hf_ctxmodels.data.prepared import (
    INDEX_FILE,
    TOKENIZER_FOLDER,
    TRAIN,
    VALIDATION,
    PreparedCorpus,
    identity_digest,
    incomplete_error,
    is_prepared,
)
from hf_ctxmodels.data.training_set import arrange_examples, check_sampling, split_sources
from hf_ctxmodels.objectives import Objective
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import FamilySpec
from hf_ctxmodels.tokenizers.base import tokenizer_digest
from hf_ctxmodels.training.evaluation import Examples
from hf_ctxmodels.training.training_state import flags_identity

FILE_FLAGS = ("dataset", "translations")
"""Flags with names of files, which are compared by the files' content."""

SMALLEST_CACHED_TEXT = 4 << 20
"""Bytes; the examples of less text, which are made in seconds, are not cached."""
_HELD_OUT_BYTES = 256 << 20  # of a streamed corpus, from which documents are held out
_MAX_CONTROL_CODES = 1000
_UNCOMPARED_FIELDS = ("family", "objective", "tokenizer", "num_proc", "streaming")


@dataclass(kw_only=True)
class CorpusArguments(DataArguments):
    """Text, tokenizer and objective."""

    tokenizer: str | None = flag(
        None,
        "Tokenizer directory, from `hf-ctxmodels data tokenizer`, or Hub id; by default of the model or the text.",
    )
    family: str | None = field(
        default=None,
        metadata={"help": "Model family; by default of the model or the prepared text.", "choices": list(FAMILIES)},
    )
    objective: str | None = flag(
        None, "Pretraining objective, by default the family's first; an unknown option lists its options.", nested=True
    )
    max_length: int = flag(128, "Maximum input length in tokens.")
    validation_fraction: float = flag(0.0, "Fraction of the documents held out for evaluation; 0 for none.")
    num_proc: int | None = flag(None, "Processes that tokenize the text; by default the available cores.")

    def __post_init__(self) -> None:
        check_range(self, "num_proc", at_least=1)

    @cached_property
    def prepared_directory(self) -> Path | None:
        """The dataset if it is a directory of `hf-ctxmodels data prepare`, the directory of the cache for its URL, or
        None; raises CtxError if it is one of several datasets, or its index cannot be downloaded."""
        directories = [source for source in self.dataset if is_prepared(source)]
        if not directories:
            return None
        if len(self.dataset) > 1:
            raise CtxError(
                "Prepared examples cannot be combined with other datasets.",
                location=f"--dataset {' '.join(self.dataset)}",
                hint="prepare all datasets together: hf-ctxmodels data prepare --dataset FIRST SECOND ...",
            )
        path = local_path(directories[0])
        return cached_index(path.rstrip("/")) if is_url(path) else Path(path)

    def open_prepared(self) -> PreparedCorpus | None:
        """The index of the prepared examples that are the dataset, or None; raises CtxError if a flag differs from the
        flag of their preparation."""
        if self.prepared_directory is None:
            return None
        path = local_path(self.dataset[0])
        corpus = PreparedCorpus.read_index(self.prepared_directory)
        names = {option.name for option in fields(DataArguments)} - {*FILE_FLAGS} | {"max_length"}
        flags = {
            f"--{option.name}": getattr(self, option.name)
            for option in fields(self)
            if option.name in names and getattr(self, option.name) not in (option.default, [], ())
        }
        prepared_flags = {f"--{name}": value for name, value in corpus.identity.items()}
        if differing := describe_differences(flags, prepared_flags, flags):
            raise CtxError(
                f"The examples were prepared with other flags: {'; '.join(differing)}.",
                location=path,
                hint="omit these flags, or prepare the text again.",
            )
        return corpus


def make_objective(
    family: FamilySpec, tokenizer: PreTrainedTokenizerBase, arguments: CorpusArguments, seed: int
) -> tuple[str, Objective]:
    """The name of the selected objective, and the objective; raises CtxError if it or an option does not exist, or the
    family has none."""
    if not family.objectives:
        raise CtxError(
            f"The family {family.name} is not pretrained on raw text.",
            location=f"--family {family.name}",
            hint=f"train it on a task: `hf-ctxmodels finetune TASK --family {family.name}:tokenizer=DIR`.",
        )
    name, option_texts = split_choice(arguments.objective or next(iter(family.objectives)))
    if name not in family.objectives:
        families = [spec.name for spec in FAMILIES.values() if name in spec.objective_classes]
        raise CtxError(
            f"The family {family.name} has no objective {name!r}"
            + (f"; families with it: {', '.join(families)}." if families else ", nor has another family."),
            location=f"--objective {name}",
            hint=f"{did_you_mean(name, family.objectives)}use one of: {', '.join(family.objectives)}"
            + (", or another family." if families else "."),
        )
    objective_class = family.objectives[name]
    names = objective_class.option_help()
    if codes := control_codes(arguments):
        if "control_codes" not in names:
            raise CtxError(
                f"The objective {name} of the family {family.name} has no control codes.",
                location="--control_codes" if arguments.control_codes else "--control_column",
                hint="use causal language modeling, such as --family gpt2 --objective clm.",
            )
        option_texts.setdefault("control_codes", ",".join(codes))
        if getattr(arguments, "model", None) is None:
            add_control_codes(tokenizer, option_texts["control_codes"].split(","))
    options = typed_options(objective_class, option_texts, location=f"--objective {name}", names=names)
    return name, objective_class(tokenizer, max_length=arguments.max_length, seed=seed, **options)


def control_codes(arguments: CorpusArguments) -> list[str]:
    """The control codes of the documents, in the order of `control_codes`, or sorted for a `control_column`, which is
    read; raises CtxError for too many codes, or a code with a comma."""
    codes = [code for code in dict.fromkeys(arguments.control_codes) if code != NONE]
    location = "--control_codes"
    if arguments.control_column is not None:
        codes, location = sorted(arguments.open().control_codes()), f"--control_column {arguments.control_column}"
    if len(codes) > _MAX_CONTROL_CODES:
        raise CtxError(
            f"{len(codes):,} control codes, at most {_MAX_CONTROL_CODES:,} are supported.",
            location=location,
            hint="use a column of sources or labels.",
        )
    if invalid := [code for code in codes if "," in code]:
        raise CtxError(f"The control code {invalid[0]!r} has a comma.", location=location, hint="rename the code.")
    return codes


def objective_identity(objective: Objective) -> dict[str, Any]:
    """What an objective and its tokenizer must share with prepared examples, as JSON values."""
    return {
        "tokenizer": tokenizer_digest(objective.tokenizer),
        "objective": type(objective).__name__,
        "objective_options": json.loads(json.dumps(objective.options)),
    }


def objective_files(objective: Objective) -> dict[str, str]:
    """Options of an objective that name files -> digests of their content."""
    files = {name: value for name, value in objective.options.items() if isinstance(value, str)}
    return {name: f"SHA-256 {file_digest(Path(file))[:12]}" for name, file in files.items() if os.path.isfile(file)}


def _with_file_contents(identity: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
    """An identity whose options have the digest of a file, from `files`, instead of its path."""
    return {**identity, "objective_options": {**identity["objective_options"], **files}}


def corpus_identity(arguments: CorpusArguments, objective: Objective, num_parts: int) -> dict[str, Any]:
    """What the examples of an objective are made from, as JSON values."""
    return {
        **objective_identity(objective),
        "version": version("hf_ctxmodels"),
        "tokenizer_files": _digest_tokenizer_files(objective.tokenizer),
        "objective_files": objective_files(objective),
        "max_length": objective.max_length,
        "seed": objective.seed,
        "parts": num_parts,
        **{
            name: value
            for name, value in flags_identity(arguments, _UNCOMPARED_FIELDS, files=FILE_FLAGS).items()
            if name in CorpusArguments.__dataclass_fields__
        },
    }


def make_preparation(
    documents: Documents, arguments: CorpusArguments, objective: Objective, directory: Path
) -> Preparation:
    """The preparation of the training documents of `arguments.load()`, and of the held-out ones, in a directory; raises
    CtxError if they cannot be sampled by `sampling_alpha`."""
    check_sampling(objective.sampling, arguments.sampling_alpha)
    fraction = arguments.validation_fraction
    # a split numbers the documents of each source
    sources = [documents] if arguments.sampling_alpha is None else split_sources(documents)
    if objective.has_heldout_loss:  # the preparation splits the documents
        sources = [source.unsplit() for source in sources]
    else:  # held-out documents have no examples
        fraction = 0.0
    parts = [part for number, source in enumerate(sources) for part in text_parts(source, objective, number)]
    identity = corpus_identity(arguments, objective, len(parts))
    return Preparation(parts, objective, objective.tokenizer, fraction, directory, identity, arguments.family)


def make_examples(
    documents: Documents,
    held_out_documents: Documents | None,
    arguments: CorpusArguments,
    objective: Objective,
    *,
    cache: bool = False,
    show_progress: bool = False,
) -> tuple[Examples, ExampleSet | None]:
    """Training examples, and held-out examples or None: from the cache, in memory, or as a stream.

    Args:
        documents, held_out_documents: From `arguments.load()`.
        cache: Write the examples of a text of at least `SMALLEST_CACHED_TEXT` into the cache.
    """
    is_small = documents.num_bytes is not None and documents.num_bytes < SMALLEST_CACHED_TEXT
    if cache and not (arguments.streaming or is_small):
        corpus = cached_corpus(documents, arguments, objective, show_progress)
        return open_examples(corpus, objective)
    held_out = None
    if held_out_documents is not None and objective.has_heldout_loss:
        if arguments.streaming:
            held_out_documents = _first_documents(held_out_documents, show_progress)
        examples = examples_of(text_parts(held_out_documents, objective), objective)
        with held_out_errors():
            held_out = ExampleSet.build(with_progress(examples, "held-out text", show_progress))
    training_examples = build_training_set(
        documents,
        objective,
        objective.sampling,
        streaming=arguments.streaming,
        alpha=arguments.sampling_alpha,
        seed=objective.seed,
        progress=partial(with_progress, description="training text", enabled=show_progress),
    )
    return training_examples, held_out


def num_text_tokens(statistics: Mapping[str, int]) -> int:
    """Number of tokens of the text in the statistics of an objective, including the targets of pairs."""
    return statistics.get("tokens", 0) + statistics.get("target_tokens", 0)


def excluded_text(examples: Examples) -> str:
    """How much text the examples lack, "3 texts left out, 20 of 100 tokens truncated"; empty if nothing, or unknown."""
    statistics = getattr(examples, "statistics", {})
    tokens = num_text_tokens(statistics)
    truncated = statistics.get("truncated_tokens", 0) + statistics.get("dropped_tokens", 0)
    parts = [f"{format_count(statistics['left_out'], 'text')} left out"] if statistics.get("left_out") else []
    parts += [f"{truncated:,} of {tokens:,} tokens truncated"] if truncated else []
    parts += [f"{statistics['unknown_tokens']:,} unknown tokens"] if statistics.get("unknown_tokens") else []
    return ", ".join(parts)


def _first_documents(documents: Documents, show_progress: bool) -> Documents:
    """The held-out documents of the first parts of a streamed corpus, which is not read as a whole."""
    selection = documents.first_parts(_HELD_OUT_BYTES)
    if len(selection.layout) < len(documents.layout):
        line = f"held-out documents of the first {len(selection.layout)} of {len(documents.layout)} parts of the corpus"
        print_status(line, show_progress)
    return selection


def prepared_objective(
    corpus: PreparedCorpus,
    family: FamilySpec,
    tokenizer: PreTrainedTokenizerBase,
    arguments: CorpusArguments,
    seed: int,
) -> tuple[str, Objective]:
    """The name of the objective of prepared examples, and the objective; raises CtxError if the flags select another
    one, the family does not have it, or the tokenizer differs."""
    identity, location = corpus.identity, local_path(arguments.dataset[0])
    if arguments.objective is not None:
        arguments = replace(arguments, max_length=identity["max_length"], control_codes=[], control_column=None)
        name, objective = make_objective(family, tokenizer, arguments, seed)
    else:
        names = [name for name, entry in family.objectives.items() if entry.__name__ == identity["objective"]]
        if not names:
            raise CtxError(
                f"The family {family.name} is not trained on the examples of {identity['objective']}.",
                location=location,
                hint="prepare the text for this family.",
            )
        name = names[0]
        objective_class = family.objectives[name]
        options = identity["objective_options"]
        for option in identity["objective_files"]:
            if not os.path.isfile(options[option]):
                raise CtxError(
                    f"The examples were prepared with the file {options[option]}, which does not exist.",
                    location=location,
                    hint=f"pass the new path of the file: --objective {name}:{option}=FILE, with the other options of "
                    "the preparation.",
                )
        objective = objective_class(tokenizer, max_length=identity["max_length"], seed=seed, **options)
    expected = _with_file_contents(objective_identity(objective), objective_files(objective))
    if differing := describe_differences(
        expected, _with_file_contents(identity, identity["objective_files"]), expected
    ):
        raise CtxError(
            f"The examples were prepared for another run: {'; '.join(differing)}.",
            location=location,
            hint="omit --objective and --tokenizer, restore files of its options, or prepare the text again.",
        )
    return name, objective


def open_examples(corpus: PreparedCorpus, objective: Objective) -> tuple[Examples, ExampleSet | None]:
    """The training examples of a prepared directory, and its held-out examples or None."""
    held_out = corpus.examples(VALIDATION)
    training_examples = arrange_examples(
        corpus.examples(TRAIN), objective, objective.sampling, corpus.identity["sampling_alpha"]
    )
    return training_examples, ExampleSet.concatenate(held_out) if held_out else None


def cached_corpus(
    documents: Documents, arguments: CorpusArguments, objective: Objective, show_progress: bool
) -> PreparedCorpus:
    """The examples of the text in the cache, which one process on a file system prepares while the others wait."""
    preparation = make_preparation(documents, arguments, objective, _cache())
    versions = _source_versions(documents, [*arguments.dataset, *arguments.translations])
    directory = preparation.directory / identity_digest({**preparation.identity, "sources": versions})[:24]
    if (corpus := _open_cached(directory)) is None:
        preparation = replace(preparation, directory=directory)
        message = "waiting for another process that prepares the text" if show_progress else ""
        hint = "set HF_HOME to another directory, or pass --no_cache."
        with wait_for_lock(Path(f"{directory}.lock"), message, hint):  # without locks, processes write equal files
            if (corpus := _open_cached(directory)) is None:
                print_status(f"preparing the text in the cache: {directory} (--no_cache disables it)", show_progress)
                preparation.run(num_proc=arguments.num_proc or cpu_count(), show_progress=show_progress)
                return preparation.merge(with_digests=False)
    print_status(f"examples of the text are in the cache: {directory}", show_progress)
    return corpus


def _cache() -> Path:
    return Path(HF_HOME) / "hf_ctxmodels" / "prepared"


def cached_index(url: str) -> Path:
    """The directory in the cache for the prepared examples at a URL, which depends on the URL and their index; index
    and tokenizer are downloaded. Raises CtxError if the examples are not complete."""
    file = f"{url}/{INDEX_FILE}"
    if file_info(file) is None:
        raise incomplete_error(url)
    with file_errors(file), open_file(file) as content:
        index = content.read()
    directory = _cache() / hashlib.sha256(url.encode() + index).hexdigest()[:24]
    folder = RemoteFolder(directory, url)
    folder.download(name for name in folder.sizes(TOKENIZER_FOLDER) if not (directory / name).is_file())
    with replacing(directory / INDEX_FILE) as temporary:
        temporary.write_bytes(index)
    return directory


def fetch_examples(source: str, corpus: PreparedCorpus) -> None:
    """Download the files of prepared examples, if the source is a URL, into their directory of the cache.

    One process on a file system downloads the missing files while the others wait. Raises CtxError if a file cannot be
    read, was changed, or is missing.
    """
    url, directory, show_progress = local_path(source).rstrip("/"), corpus.directory, is_main_process()
    if is_url(url):
        if corpus.damaged_files():
            message = "waiting for another process that downloads the prepared text" if show_progress else ""
            with wait_for_lock(Path(f"{directory}.lock"), message, "set HF_HOME to another directory."):
                if missing := corpus.damaged_files():
                    size = format_number(sum(corpus.files[name].size for name in missing))
                    print_status(f"downloading {size}B from {url} into the cache: {directory}", show_progress)
                    digests = {name: corpus.files[name].sha256 for name in missing}
                    RemoteFolder(directory, url).download(missing, digests, show_progress)
        print_status(f"examples of {url} are in the cache: {directory}", show_progress)
    corpus.check_files()


def _open_cached(directory: Path) -> PreparedCorpus | None:
    """The complete examples in a directory of the cache, or None if they are missing or damaged."""
    with suppress(CtxError):
        return PreparedCorpus.open(directory)
    return None


def _digest_tokenizer_files(tokenizer: PreTrainedTokenizerBase) -> str:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return identity_digest({path.name: file_digest(path) for path in sorted(Path(folder).iterdir())})


def _source_versions(documents: Documents, sources: Iterable[str]) -> list[Any]:
    """Modification times of local files, and fingerprints of datasets of the Hub."""
    times = [(file, os.stat(file).st_mtime_ns) for file in document_files(sources)]
    readers = [chunk.read for part in documents.layout for chunk in part.chunks]
    return [*times, *sorted({fingerprint for reader in readers for fingerprint in _fingerprints(reader)})]


def _fingerprints(reader: Any) -> Iterator[str]:
    """The fingerprints of the datasets among the arguments of a partial function, or of one among them."""
    for argument in getattr(reader, "args", ()):
        if hasattr(argument, "_fingerprint"):
            yield argument._fingerprint
        yield from _fingerprints(argument)


def with_progress(examples: Iterable[Example], description: str, enabled: bool) -> Iterator[Example]:
    """The examples, with a progress bar while they are built, and a line with their number and the time."""
    start, number = time.perf_counter(), 0
    for example in progress_bar(examples, f"building {description}", unit="examples", enabled=enabled):
        number += 1
        yield example
    seconds = time.perf_counter() - start
    print_status(f"{description}: {format_count(number, 'example')} in {seconds:.1f} s", enabled)
