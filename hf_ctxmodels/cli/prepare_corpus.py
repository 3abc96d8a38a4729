r"""Tokenize a text once for an objective, into files that `pretrain --dataset DIR` opens at once.

    hf-ctxmodels data prepare --family bert --tokenizer DIR --dataset "corpus/*.jsonl.zst" --output_dir DIR

Several processes prepare parts of the text, of about 64 MB each. An interrupted command continues with the missing
parts. Independent jobs can prepare a large text, each with `--shard I/N`, on a shared file system or in an object store
(--output_dir s3://bucket/prepared); a last command with `--merge` checks the parts and completes the directory.
`pretrain --dataset s3://bucket/prepared` downloads the files into the cache.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from joblib import cpu_count

from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.console import format_count, format_next_commands, format_number
from hf_ctxmodels.core.constants import MAX_SEED
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, check_range, flag
from hf_ctxmodels.core.output_files import require_writable
from hf_ctxmodels.core.paths import is_url, local_path
from hf_ctxmodels.data.files import file_system
from hf_ctxmodels.data.folders import LocalFolder
from hf_ctxmodels.data.preparation import Preparation
from hf_ctxmodels.data.prepared import TRAIN, VALIDATION, PreparedCorpus
from hf_ctxmodels.registry import get_family
from hf_ctxmodels.training.corpora import CorpusArguments, make_objective, make_preparation, num_text_tokens
from hf_ctxmodels.training.model_loading import load_tokenizer

ESSENTIAL = ("family", "tokenizer", "dataset", "objective", "max_length", "output_dir", "num_proc")


@dataclass
class PreparationArguments:
    """Output and jobs."""

    output_dir: str = flag(
        REQUIRED, "Output directory, or URL of a folder (`s3://` needs the package s3fs, `gs://` gcsfs)."
    )
    seed: int = flag(42, "Seed of sampled pairs and lengths; pretrain has the same default.")
    shard: str | None = flag(None, "I/N: prepare only the parts of job I of N jobs, counted from 0, and do not merge.")
    merge: bool = flag(False, "Check all parts, made by jobs with --shard, and complete the directory.")
    overwrite: bool = flag(False, "Replace prepared examples in --output_dir.")

    def __post_init__(self) -> None:
        check_range(self, "seed", at_least=0, at_most=MAX_SEED)
        modes = [name for name in ("shard", "merge", "overwrite") if getattr(self, name)]
        if len(modes) > 1:
            raise CtxError(
                "A job adds parts, --merge completes a directory, and --overwrite starts from an empty one.",
                location=f"--{modes[0]} --{modes[1]}",
                hint="use one of them at a time: the jobs with --shard first, and then --merge.",
            )

    def selected_parts(self, number: int) -> range:
        """The parts of this job, of `number` parts; raises CtxError if `shard` is not I/N with I < N."""
        if self.shard is None:
            return range(number)
        index, _, count = self.shard.partition("/")
        if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
            raise CtxError(
                "Expected I/N, with I from 0 to N - 1.",
                location=f"--shard {self.shard}",
                hint="number the jobs from 0, such as --shard 0/8 to --shard 7/8.",
            )
        return range(int(index), number, int(count))


def main() -> None:
    """Prepare, and print the number of examples."""
    corpus_arguments, arguments = parse_arguments(
        CorpusArguments, PreparationArguments, description=__doc__, essential=ESSENTIAL
    )
    for name, value in (("--family", corpus_arguments.family), ("--tokenizer", corpus_arguments.tokenizer)):
        if value is None:
            raise CtxError(f"{name} is required.", location="hf-ctxmodels data prepare", hint=f"pass {name}.")
    if corpus_arguments.streaming:
        raise CtxError("A stream cannot be prepared.", location="--streaming", hint="omit the flag.")
    output = local_path(arguments.output_dir)
    if not is_url(output):
        require_writable(output, "--output_dir")
        prepare(preparation_of(corpus_arguments, arguments.seed, Path(output)), arguments, corpus_arguments.num_proc)
        return
    file_system(output)  # raises without the package of the protocol
    with TemporaryDirectory() as folder:
        preparation = replace(preparation_of(corpus_arguments, arguments.seed, Path(folder)), url=output.rstrip("/"))
        prepare(preparation, arguments, corpus_arguments.num_proc)


def prepare(preparation: Preparation, arguments: PreparationArguments, num_proc: int | None) -> None:
    """Prepare or merge parts, and print their number, or the number of examples."""
    if arguments.overwrite:
        preparation.delete()
    if not arguments.merge:
        numbers = arguments.selected_parts(len(preparation.parts))
        preparation.run(numbers, num_proc or cpu_count(), show_progress=True)
        if arguments.shard is not None:
            print(f"job {arguments.shard}: {len(numbers)} of {len(preparation.parts)} parts in {preparation.folder}")
            return
    print_corpus(preparation.merge(with_digests=arguments.merge), preparation.folder)


def preparation_of(arguments: CorpusArguments, seed: int, directory: Path) -> Preparation:
    """The preparation of the flags."""
    tokenizer = load_tokenizer(str(arguments.tokenizer))
    _, objective = make_objective(get_family(str(arguments.family)), tokenizer, arguments, seed)
    documents, _ = arguments.load()
    return make_preparation(documents, arguments, objective, directory)


def print_corpus(corpus: PreparedCorpus, folder: LocalFolder) -> None:
    """Print the number of parts, examples and tokens, the size of the files, and the next command."""
    files = [(split, file) for record in corpus.parts for split, file in record.files.items()]
    size = format_number(sum(file.size for _, file in files))
    print(f"{format_count(len(corpus.parts), 'part')} in {folder}, {size}B:")
    for split in (TRAIN, VALIDATION):
        if number := sum(file.examples for name, file in files if name == split):
            tokens = sum(num_text_tokens(record.statistics.get(split, {})) for record in corpus.parts)
            print(f"  {split:<12}{number:>14,} examples" + (f"{tokens:>18,} tokens of text" if tokens else ""))
    print(format_next_commands(("pretrain", "--dataset", folder, "--output_dir", "DIR")))
