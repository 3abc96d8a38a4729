r"""Mine pairs of translations in two files of unaligned sentences, by the margin of their vectors.

    hf-ctxmodels evaluate mining --model runs/laser --source de-en.de --target de-en.en --gold de-en.gold
    hf-ctxmodels evaluate mining --model runs/xlm --pooling mean --source de=news.de.txt --target en=news.en.txt \
        --threshold 1.06 --output_file pairs.tsv

A line of a file is an id and a sentence, separated by a tab, as in BUCC, or a sentence. With --gold, a fixed part of
the source sentences tunes the threshold, and the F1 of the others is printed, together with a baseline without a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from transformers import AutoModel

from hf_ctxmodels.architectures.sentence_encoder import encode_sentences
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.devices import DeviceArguments
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, check_range, flag, parse_choices
from hf_ctxmodels.core.output_files import check_output_file, write_text_file
from hf_ctxmodels.data.text_files import read_lines
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import load_model_and_tokenizer
from hf_ctxmodels.downstream.tasks.languages import set_language, split_language
from hf_ctxmodels.downstream.tasks.metrics import range_note
from hf_ctxmodels.evaluation.mining import (
    Candidates,
    ExactSearch,
    FaissSearch,
    Margin,
    MinedPair,
    best_threshold,
    lexical_vectors,
    mine_pairs,
    score_pairs,
)
from hf_ctxmodels.layers.pooling import Pooling


@dataclass
class MiningArguments:
    """Model, sentences and mining."""

    model: str = flag(REQUIRED, "Checkpoint directory or Hub id of an encoder of several languages.")
    source: str = flag(REQUIRED, "File of sentences: FILE, or LANGUAGE=FILE for a model with language embeddings.")
    target: str = flag(REQUIRED, "File of sentences of the other language.")
    gold: str | None = flag(None, "File with the ids, or line numbers, of a source and a target sentence per line.")
    pooling: Pooling | None = flag(None, "Pooling of the hidden states; by default the pooling of the model.")
    neighbors: int = flag(4, "Nearest neighbors k of the margin.")
    margin: Margin = flag("ratio", "Margin of a cosine and the mean cosines with the neighbors.")
    candidates: Candidates = flag("max", "Direction of the search, or combination of both directions.")
    threshold: float | None = flag(None, "Smallest margin of a pair; by default tuned on a part of --gold.")
    tuning_share: float = flag(0.5, "Share of the source sentences that tunes the threshold.", conflicts=("threshold",))
    search: ExactSearch | FaissSearch = flag(
        "exact", "Search of nearest neighbors.", {"exact": ExactSearch, "faiss": FaissSearch}
    )
    output_file: str | None = flag(None, "TSV file for the mined pairs.")
    overwrite: bool = flag(False, "Replace --output_file.")
    batch_size: int = flag(64, "Sentences per batch.")

    def __post_init__(self) -> None:
        parse_choices(self)
        check_range(self, "neighbors", "batch_size", at_least=1)
        check_range(self, "tuning_share", above=0, below=1)
        if self.gold is None and self.threshold is None:
            raise CtxError("No threshold.", location="--threshold", hint="pass --threshold, or --gold to tune it.")


@dataclass(frozen=True)
class SentenceFile:
    """The sentences of a file by id, in file order; without ids, by line number from 1."""

    language: str
    file: str
    sentences: dict[str, str]

    @classmethod
    def read(cls, entry: str) -> "SentenceFile":
        """Read the file of an entry FILE or LANGUAGE=FILE; raises CtxError if it has no sentences or an id twice."""
        language, file = split_language(entry)
        lines = [line.rstrip("\r\n") for line in read_lines(file)]
        has_ids = bool(lines) and "\t" in lines[0]
        sentences: dict[str, str] = {}
        for number, line in enumerate(lines, 1):
            key, _, text = line.partition("\t") if has_ids else (str(number), "", line)
            if not text.strip():
                if has_ids:
                    raise CtxError(
                        f"Expected an id and a sentence, got {line[:100]!r}.",
                        location=f"{file}:{number}",
                        hint="separate them by a tab, or remove the line.",
                    )
                continue
            if key in sentences:
                raise CtxError(f"Two sentences have the id {key!r}.", location=file, hint="make the ids unique.")
            sentences[key] = text.strip()
        if not sentences:
            raise CtxError("The file has no sentences.", location=file, hint="use a file with a sentence per line.")
        return cls(language, file, sentences)


def read_gold(file: str, source: SentenceFile, target: SentenceFile) -> set[tuple[int, int]]:
    """Pairs of indices of sentences; raises CtxError for a line without two ids of the files."""
    sides = [{key: index for index, key in enumerate(side.sentences)} for side in (source, target)]
    pairs = set()
    for number, line in enumerate(read_lines(file), 1):
        keys = line.split()
        if not keys:
            continue
        if len(keys) != 2 or keys[0] not in sides[0] or keys[1] not in sides[1]:
            raise CtxError(
                f"{line.strip()[:100]!r} is not a pair of ids of sentences.",
                location=f"{file}:{number}",
                hint="write the id of a source sentence, a tab, and the id of a target sentence.",
            )
        pairs.add((sides[0][keys[0]], sides[1][keys[1]]))
    if not pairs:
        raise CtxError("The file has no pairs.", location=file, hint="use a file with a pair of ids per line.")
    return pairs


def main() -> None:
    """Mine, print the scores, and write the pairs."""
    arguments, placement = parse_arguments(MiningArguments, DeviceArguments, description=__doc__)
    sides = SentenceFile.read(arguments.source), SentenceFile.read(arguments.target)
    gold = None if arguments.gold is None else read_gold(arguments.gold, *sides)
    if arguments.output_file is not None:
        inputs = (*(side.file for side in sides), arguments.gold)
        check_output_file(arguments.output_file, flag="--output_file", overwrite=arguments.overwrite, inputs=inputs)
    model, tokenizer = load_model_and_tokenizer(arguments.model, AutoModel.__name__)
    placement.place(model)
    mine = partial(
        mine_pairs,
        neighbors=arguments.neighbors,
        margin=arguments.margin,
        candidates=arguments.candidates,
        search=arguments.search,
    )
    vectors: list[Tensor] = []
    for side, location in zip(sides, ("--source", "--target"), strict=True):
        if side.language:
            set_language(model.config, tokenizer, side.language, location)
        sentences = [*side.sentences.values()]
        vectors.append(
            encode_sentences(model, tokenizer, sentences, pooling=arguments.pooling, batch_size=arguments.batch_size)
        )
    mined = mine(*vectors)
    threshold = arguments.threshold
    num_sources, num_targets = (len(side.sentences) for side in sides)
    print(f"{num_sources:,} source and {num_targets:,} target sentences")
    if gold is not None:
        threshold = print_scores("model", mined, gold, num_sources, arguments)
        lexical = mine(*lexical_vectors(*([*side.sentences.values()] for side in sides)))
        # the margins of the baseline have another scale, so its threshold is always tuned
        print_scores("baseline", lexical, gold, num_sources, replace(arguments, threshold=None))
        print(range_note("precision", "recall", "f1") + "; baseline: TF-IDF of character n-grams")
    assert threshold is not None
    accepted = [pair for pair in mined if pair.score >= threshold]
    print(f"{len(accepted):,} pairs with a margin of at least {threshold:.4f}")
    if arguments.output_file is not None:
        write_text_file(arguments.output_file, pair_table(accepted, *sides))
        print(f"saved in {arguments.output_file}")


def print_scores(
    name: str, mined: Sequence[MinedPair], gold: set[tuple[int, int]], num_sources: int, arguments: MiningArguments
) -> float:
    """Print the scores of the pairs that did not tune the threshold, and return the threshold."""
    threshold, test_gold, test_mined = arguments.threshold, gold, list(mined)
    if threshold is None:
        order = torch.randperm(num_sources, generator=torch.Generator().manual_seed(0)).tolist()
        tuning = set(order[: round(arguments.tuning_share * num_sources)])
        tuning_gold, test_gold = ({pair for pair in gold if (pair[0] in tuning) == side} for side in (True, False))
        if not tuning_gold or not test_gold:
            raise CtxError(
                f"All {len(gold)} gold pairs are in one part.", location="--tuning_share", hint="pass another value."
            )
        threshold = best_threshold([pair for pair in mined if pair.source in tuning], tuning_gold)
        test_mined = [pair for pair in mined if pair.source not in tuning]
    scores = score_pairs(test_mined, test_gold, threshold)
    print(
        f"{name:<10} precision {scores.precision:.4f}  recall {scores.recall:.4f}  f1 {scores.f1:.4f}  "
        f"threshold {threshold:.4f}  {len(test_gold)} gold pairs"
    )
    return threshold


def pair_table(pairs: Sequence[MinedPair], source: SentenceFile, target: SentenceFile) -> str:
    """A table with the margins, ids and sentences of pairs."""
    sides = [[*side.sentences.items()] for side in (source, target)]
    lines = ["\t".join(("margin", "source_id", "target_id", "source", "target"))]
    for pair in pairs:
        (source_id, source_text), (target_id, target_text) = sides[0][pair.source], sides[1][pair.target]
        cells = (f"{pair.score:.6f}", source_id, target_id, source_text, target_text)
        lines.append("\t".join(cell.replace("\t", " ") for cell in cells))
    return "\n".join(lines) + "\n"
