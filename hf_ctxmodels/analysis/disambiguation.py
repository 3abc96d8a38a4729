"""Word sense disambiguation by layer on SemCor: nearest mean of a sense, and probes of the senses.

A sense is a lemma with a part of speech and a sense key; WordNet itself is not needed.
"""

import random
import re
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ctxmodels.analysis.senses import Occurrence, encode_occurrences, sample_occurrences
from hf_ctxmodels.architectures.word_encoder import WordEncoder
from hf_ctxmodels.core.console import progress_bar
from hf_ctxmodels.core.errors import CtxError, wrap_errors

_ELEMENT = re.compile(r"<(wf|punc|s)\b([^>]*)>(?:([^<\n]*)</)?")
_PARTS_OF_SPEECH = {"1": "noun", "2": "verb", "3": "adjective", "4": "adverb", "5": "adjective"}  # of a sense key
_PROBE_STEPS = 600
_PROBE_BATCH = 512  # instances
_PROBE_LEMMA_INSTANCES = 32  # of a lemma in a batch
_PROBE_MARGIN = 0.1  # of cosines around their mean before training


@dataclass(frozen=True)
class SenseInstance:
    """A word with its senses.

    Attributes:
        lemma: Lemma and part of speech: `bank (noun)`.
        senses: Sense keys without the lemma (`1:14:00::`), mostly one.
        start, stop: First word, and the word after the last.
        is_first_sense: Whether WordNet lists one of them first.
    """

    lemma: str
    senses: tuple[str, ...]
    start: int
    stop: int
    is_first_sense: bool


@dataclass(frozen=True)
class SenseSentence:
    """The words of a sentence, its sense-tagged words, and the name of its file."""

    words: list[str]
    instances: list[SenseInstance]
    file: str


def read_semcor(source: str | Path) -> list[SenseSentence]:
    """The sentences of SemCor: an archive (.tar.gz), a folder of tag files, or one tag file.

    `<wf cmd=done pos=NN lemma=bank wnsn=1 lexsn=1:14:00::>banks</wf>` is a word; the words of a compound are separated
    by `_`.

    Raises:
        CtxError: The file cannot be read, or has no tagged word.
    """
    with wrap_errors("SemCor cannot be read", location=str(source), hint="use its archive or a folder of tag files."):
        files = sorted(_semcor_files(Path(source)))
    sentences = [sentence for name, text in files for sentence in _parse_semcor(text, name)]
    if not any(sentence.instances for sentence in sentences):
        raise CtxError("The file has no sense-tagged words.", location=str(source), hint="use the tag files of SemCor.")
    return sentences


def _semcor_files(source: Path) -> Iterator[tuple[str, str]]:
    """Names and texts of the tag files."""
    if source.is_dir():
        for path in source.rglob("*"):
            if path.is_file():
                yield path.name, path.read_text("utf-8", errors="replace")
    elif tarfile.is_tarfile(source):
        with tarfile.open(source) as archive:
            for member in archive:  # in the order of the archive, which is compressed as one stream
                file = archive.extractfile(member)
                if file is not None:
                    yield Path(member.name).name, file.read().decode("utf-8", errors="replace")
    else:
        yield source.name, source.read_text("utf-8", errors="replace")


def _parse_semcor(text: str, file: str) -> list[SenseSentence]:
    sentences: list[SenseSentence] = []
    for name, attribute_text, content in _ELEMENT.findall(text):
        if name == "s":
            sentences.append(SenseSentence([], [], file))
            continue
        words = [word for word in content.split("_") if word]
        if not words or not sentences:
            continue
        sentence = sentences[-1]
        start = len(sentence.words)
        sentence.words.extend(words)
        attributes = dict(item.partition("=")[::2] for item in attribute_text.split())
        numbers, keys = attributes.get("wnsn", "").split(";"), attributes.get("lexsn", "").split(";")
        senses = [(number, key) for number, key in zip(numbers, keys) if key]
        if senses and "lemma" in attributes:
            part_of_speech = _PARTS_OF_SPEECH.get(senses[0][1][:1], "?")
            sentence.instances.append(
                SenseInstance(
                    f"{attributes['lemma']} ({part_of_speech})",
                    tuple(key for _, key in senses),
                    start,
                    len(sentence.words),
                    any(number == "1" for number, _ in senses),
                )
            )
    return sentences


def find_sense_occurrences(
    sentences: Sequence[SenseSentence], lemma: str, max_occurrences: int | None = None, seed: int = 0
) -> list[Occurrence]:
    """The tagged occurrences of a lemma in all parts of speech, labeled by part of speech and sense key; arguments and
    errors as for `find_occurrences`."""
    occurrences = [
        Occurrence(number, instance.start, instance.stop, f"{instance.lemma} {instance.senses[0]}")
        for number, sentence in enumerate(sentences)
        for instance in sentence.instances
        if instance.lemma.rpartition(" ")[0].casefold() == lemma.casefold()
    ]
    if not occurrences:
        raise CtxError(f"The lemma {lemma!r} has no tagged occurrence.", hint="use another lemma.")
    return sample_occurrences(occurrences, max_occurrences, seed)


@dataclass(frozen=True)
class SenseAccuracy:
    """Accuracy of word sense disambiguation on held-out files.

    Attributes:
        layers: Numbers of the layers.
        accuracy: (splits, layers) accuracy of the nearest mean of a sense.
        most_frequent: (splits,) accuracy of the most frequent sense in the training files.
        probes: Rank -> (splits,) accuracy of the nearest mean in the last layer under a trained probe.
        upper_bound: (splits,) fraction of the instances that can be correct: with a sense in the training files, or,
            if their lemma is not there, with WordNet's first sense.
        instances: Number of test instances of each split.
        lemmas: Number of ambiguous lemmas.
    """

    layers: tuple[int, ...]
    accuracy: Tensor
    most_frequent: Tensor
    probes: dict[int, Tensor]
    upper_bound: Tensor
    instances: list[int]
    lemmas: int


def disambiguate(
    encoder: WordEncoder,
    sentences: Sequence[SenseSentence],
    *,
    max_lemmas: int | None = None,
    seeds: Sequence[int] = (0,),
    test_fraction: float = 0.2,
    probe_ranks: Sequence[int] = (),
) -> SenseAccuracy:
    """Word sense disambiguation by the nearest mean vector of a sense (Peters et al. 2018, arXiv 1802.05365, section
    5.3), by cosine among the senses of the lemma and part of speech.

    Only lemmas with two or more senses in the corpus count. The files of the corpus are split into training and test
    files, once for each seed. A lemma that is not in the training files gets the first sense of WordNet.

    Args:
        encoder: Model with its tokenizer. The vectors of all instances are held in float16.
        sentences: See `read_semcor`.
        max_lemmas: Use a random sample of this number of ambiguous lemmas; None for all.
        seeds: Seeds of the splits.
        test_fraction: Fraction of the files that are tested.
        probe_ranks: Ranks of probes of the last layer, see `train_sense_probe`.

    Raises:
        CtxError: There are fewer than two files, or no ambiguous lemma.
    """
    files = sorted({sentence.file for sentence in sentences})
    rows_by_lemma, instances, occurrences = _ambiguous_instances(sentences, max_lemmas)
    if len(files) < 2 or not rows_by_lemma:
        raise CtxError(
            f"Disambiguation needs two files and an ambiguous lemma, got {len(files)} files and {len(rows_by_lemma)} "
            "ambiguous lemmas.",
            hint="use several files with words of two or more senses.",
        )
    words = [sentence.words for sentence in sentences]
    vectors, _ = encode_occurrences(encoder, words, occurrences, dtype=torch.float16)
    lemma_ids = torch.empty(len(instances), dtype=torch.long)
    for number, rows in enumerate(rows_by_lemma.values()):
        lemma_ids[rows] = number
    senses = {pair: number for number, pair in enumerate(sorted({(row.lemma, row.senses[0]) for row in instances}))}
    sense_ids = torch.tensor([senses[row.lemma, row.senses[0]] for row in instances])

    def scores(states: Tensor, is_test: Tensor) -> Tensor:
        counts = [
            _lemma_scores(states[rows], [instances[row] for row in rows], is_test[rows])
            for rows in rows_by_lemma.values()
        ]
        return torch.stack(counts).sum(0) / is_test.sum()

    results, sizes = [], []
    probe_results: dict[int, list[Tensor]] = {rank: [] for rank in probe_ranks}
    for seed in seeds:
        size = min(len(files) - 1, max(1, round(test_fraction * len(files))))
        test_files = set(random.Random(seed).sample(files, size))
        is_test = torch.tensor([sentences[occurrence.sentence].file in test_files for occurrence in occurrences])
        sizes.append(int(is_test.sum()))
        results.append(scores(vectors, is_test))
        last, training = vectors[:, -1], ~is_test
        for rank, accuracies in probe_results.items():
            probe = train_sense_probe(last[training], lemma_ids[training], sense_ids[training], rank, seed)
            accuracies.append(scores((last.float() @ probe)[:, None], is_test)[2])
    most_frequent, upper_bound, *accuracy = torch.stack(results).unbind(1)
    return SenseAccuracy(
        layers=encoder.layers,
        accuracy=torch.stack(accuracy, 1),
        most_frequent=most_frequent,
        probes={rank: torch.stack(accuracies) for rank, accuracies in probe_results.items()},
        upper_bound=upper_bound,
        instances=sizes,
        lemmas=len(rows_by_lemma),
    )


def _ambiguous_instances(
    sentences: Sequence[SenseSentence], max_lemmas: int | None
) -> tuple[dict[str, list[int]], list[SenseInstance], list[Occurrence]]:
    """Rows of the instances of each lemma with several senses, the instances, and their words."""
    senses_by_lemma: dict[str, set[str]] = defaultdict(set)
    for sentence in sentences:
        for instance in sentence.instances:
            senses_by_lemma[instance.lemma].update(instance.senses)
    lemmas = sorted(lemma for lemma, senses in senses_by_lemma.items() if len(senses) > 1)
    if max_lemmas is not None and max_lemmas < len(lemmas):
        lemmas = random.Random(0).sample(lemmas, max_lemmas)
    rows_by_lemma: dict[str, list[int]] = {lemma: [] for lemma in lemmas}
    instances: list[SenseInstance] = []
    occurrences: list[Occurrence] = []
    for number, sentence in enumerate(sentences):
        for instance in sentence.instances:
            if instance.lemma in rows_by_lemma:
                rows_by_lemma[instance.lemma].append(len(instances))
                instances.append(instance)
                occurrences.append(Occurrence(number, instance.start, instance.stop))
    return rows_by_lemma, instances, occurrences


def _lemma_scores(vectors: Tensor, instances: Sequence[SenseInstance], is_test: Tensor) -> Tensor:
    """Numbers of test instances of a lemma for (n, layers, hidden) vectors: correct by the most frequent sense; with a
    sense in the training files; correct by the nearest mean in each layer."""
    training = [instances[index] for index in (~is_test).nonzero()[:, 0].tolist()]
    test = [instances[index] for index in is_test.nonzero()[:, 0].tolist()]
    if not training:
        return torch.full((vectors.shape[1] + 2,), sum(instance.is_first_sense for instance in test)).double()
    # the first sense of WordNet first: it wins ties of the frequency
    by_rank = sorted(training, key=lambda instance: not instance.is_first_sense)
    senses = [sense for sense, _ in Counter(instance.senses[0] for instance in by_rank).most_common()]
    sense_ids = torch.tensor([senses.index(instance.senses[0]) for instance in training])
    sums = torch.zeros(len(senses), *vectors.shape[1:]).index_add_(0, sense_ids, vectors[~is_test].float())
    means = F.normalize(sums, dim=-1)  # the length of a mean does not matter for cosines
    predictions = torch.einsum("nlh,slh->nls", vectors[is_test].float(), means).argmax(-1)
    is_gold = torch.tensor([[sense in instance.senses for sense in senses] for instance in test]).view(-1, len(senses))
    is_correct = is_gold.gather(1, predictions)
    return torch.cat([is_gold[:, :1].sum(0), is_gold.any(1, keepdim=True).sum(0), is_correct.sum(0)]).double()


def train_sense_probe(vectors: Tensor, lemmas: Tensor, senses: Tensor, rank: int, seed: int = 0) -> Tensor:
    """Train a (hidden, rank) map under which occurrences of a lemma are similar exactly if their senses are equal
    (Coenen et al. 2019, arXiv 1906.02715, section 4).

    The loss is the mean cosine of pairs of different senses minus the mean cosine of pairs of the same sense; each
    cosine is clamped to 0.1 around the mean of its kind before training.

    Args:
        vectors: (n, hidden) vectors of occurrences.
        lemmas, senses: (n,) numbers of their lemmas, and of their senses.
        rank: Columns of the map.
        seed: Seed of the initial map and of the batches.

    Raises:
        CtxError: No lemma has two occurrences of the same and of different senses.
    """
    generator = torch.Generator().manual_seed(seed)
    probe = torch.empty(vectors.shape[1], rank).uniform_(-0.05, 0.05, generator=generator).requires_grad_()
    rows_by_lemma = [torch.nonzero(lemmas == lemma)[:, 0] for lemma in lemmas.unique()]
    rows_by_lemma = [rows for rows in rows_by_lemma if len(rows) > 1]

    def batch() -> tuple[Tensor, Tensor, Tensor]:
        """Unit vectors are computed from the rows; masks of pairs of the same, and of different senses."""
        selected: list[Tensor] = []
        for index in torch.randperm(len(rows_by_lemma), generator=generator).tolist():
            rows = rows_by_lemma[index]
            order = torch.randperm(len(rows), generator=generator)[:_PROBE_LEMMA_INSTANCES]
            selected.append(rows[order])
            if sum(map(len, selected)) >= _PROBE_BATCH:
                break
        rows = torch.cat(selected)
        is_pair = (lemmas[rows, None] == lemmas[rows]).triu(1)
        is_same = senses[rows, None] == senses[rows]
        return vectors[rows].float(), is_pair & is_same, is_pair & ~is_same

    def cosines(batch_vectors: Tensor) -> Tensor:
        units = F.normalize(batch_vectors, dim=-1)
        return units @ units.T

    before = [(cosines(states), same, different) for states, same, different in (batch() for _ in range(20))]
    same_count = sum(int(same.sum()) for _, same, _ in before)
    different_count = sum(int(different.sum()) for *_, different in before)
    if not same_count or not different_count:
        raise CtxError("No lemma has occurrences of the same and of different senses.", hint="use more lemmas.")
    same_mean = sum(float(values[same].sum()) for values, same, _ in before) / same_count
    different_mean = sum(float(values[different].sum()) for values, _, different in before) / different_count
    optimizer = torch.optim.Adam([probe], 1e-3)
    for _ in progress_bar(range(_PROBE_STEPS), f"probe of rank {rank}", unit="steps"):
        states, same, different = batch()
        if not same.any() or not different.any():
            continue
        values = cosines(states @ probe)
        losses = [
            values[mask].clamp(mean - _PROBE_MARGIN, mean + _PROBE_MARGIN).mean()
            for mask, mean in ((different, different_mean), (same, same_mean))
        ]
        optimizer.zero_grad()
        (losses[0] - losses[1]).backward()
        optimizer.step()
    return probe.detach()
