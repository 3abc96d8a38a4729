"""Senses of words: occurrences of a word over a corpus, and word sense disambiguation by layer on SemCor."""

import random
import re
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ctxmodels.architectures.word_encoder import EncodedCorpus, WordEncoder
from hf_ctxmodels.core.console import progress_bar
from hf_ctxmodels.core.errors import CtxError, require_packages, wrap_errors

Projection = Literal["pca", "umap"]

_ELEMENT = re.compile(r"<(wf|punc|s)\b([^>]*)>(?:([^<\n]*)</)?")
_PARTS_OF_SPEECH = {"1": "noun", "2": "verb", "3": "adjective", "4": "adverb", "5": "adjective"}  # of a sense key
_CONTEXT_WORDS = 12  # words before and after an occurrence
_MAX_SCORES = 2**24  # cosines in memory at the same time


class Occurrence(NamedTuple):
    """A word, or several consecutive ones, of a sentence, and optionally its sense or tag."""

    sentence: int
    start: int
    stop: int
    label: str = ""


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
    """The words of a sentence and the tagged ones among them; `file` is the text that the sentence is from."""

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
        raise CtxError("There is no sense-tagged word.", location=str(source), hint="use the tag files of SemCor.")
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


def find_occurrences(
    sentences: Sequence[Sequence[str]],
    word: str,
    max_occurrences: int | None = None,
    seed: int = 0,
    *,
    tags: Sequence[Sequence[str]] | None = None,
) -> list[Occurrence]:
    """The occurrences of a word, in any case, in order; a random sample if there are more than `max_occurrences`. The
    `tags` of all words, if any, are their labels.

    Raises:
        CtxError: The word does not occur.
    """
    occurrences = [
        Occurrence(number, index, index + 1, tags[number][index] if tags else "")
        for number, sentence in enumerate(sentences)
        for index, text in enumerate(sentence)
        if text.casefold() == word.casefold()
    ]
    if not occurrences:
        raise CtxError(f"The word {word!r} does not occur.", hint="use another word, or more text.")
    return _sample(occurrences, max_occurrences, seed)


def find_sense_occurrences(
    sentences: Sequence[SenseSentence], lemma: str, max_occurrences: int | None = None, seed: int = 0
) -> list[Occurrence]:
    """The tagged occurrences of a lemma in all parts of speech, labelled by part of speech and sense key; arguments and
    errors as for `find_occurrences`."""
    occurrences = [
        Occurrence(number, instance.start, instance.stop, f"{instance.lemma} {instance.senses[0]}")
        for number, sentence in enumerate(sentences)
        for instance in sentence.instances
        if instance.lemma.rpartition(" ")[0].casefold() == lemma.casefold()
    ]
    if not occurrences:
        raise CtxError(f"The lemma {lemma!r} has no tagged occurrence.", hint="use another lemma.")
    return _sample(occurrences, max_occurrences, seed)


def _sample(occurrences: list[Occurrence], size: int | None, seed: int) -> list[Occurrence]:
    if size is None or len(occurrences) <= size:
        return occurrences
    return sorted(random.Random(seed).sample(occurrences, size))


def encode_occurrences(
    encoder: WordEncoder,
    sentences: Sequence[Sequence[str]],
    occurrences: Sequence[Occurrence],
    *,
    dtype: torch.dtype = torch.float32,
    progress: bool = True,
) -> tuple[Tensor, Tensor]:
    """Encode the sentences with occurrences.

    Returns:
        (occurrences, layers, hidden) mean vectors of their words, and (occurrences,) whether they have tokens.
    """
    rows_by_sentence: dict[int, list[int]] = defaultdict(list)
    for row, occurrence in enumerate(occurrences):
        rows_by_sentence[occurrence.sentence].append(row)
    vectors = torch.zeros(len(occurrences), len(encoder.layers), encoder.hidden_size, dtype=dtype)
    has_tokens = torch.zeros(len(occurrences), dtype=torch.bool)
    encoded = encoder.encode(sentences[number] for number in rows_by_sentence)
    bar = progress_bar(encoded, "encoding", unit="sentences", total=len(rows_by_sentence), enabled=progress)
    for sentence, rows in zip(bar, rows_by_sentence.values()):
        for row in rows:
            words = slice(occurrences[row].start, occurrences[row].stop)
            is_encoded = sentence.has_tokens[words]
            has_tokens[row] = bool(is_encoded.any())
            if has_tokens[row]:
                vectors[row] = sentence.vectors[words][is_encoded].mean(0)
    return vectors, has_tokens


def project(vectors: Tensor, method: Projection = "pca", seed: int = 0) -> Tensor:
    """Map (n, layers, hidden) vectors to (n, layers, 2), each layer separately.

    Args:
        vectors: Vectors of n > 2 occurrences.
        method: "pca", the first two principal components; or "umap" (McInnes et al. 2018), which preserves
            neighbourhoods and needs the extra `umap`.
        seed: Seed of UMAP.
    """
    if len(vectors) < 3:
        raise CtxError(f"{len(vectors)} occurrences cannot be mapped.", hint="use more text, or a frequent word.")
    maps = []
    for layer in vectors.float().unbind(1):
        if method == "umap":
            maps.append(_umap(layer, seed))
            continue
        centred = layer - layer.mean(0)
        components, _, _ = torch.linalg.svd(centred.T, full_matrices=False)
        components = F.pad(components[:, :2], (0, max(0, 2 - components.shape[1])))
        largest = components.abs().argmax(0, keepdim=True)
        maps.append(centred @ (components * components.gather(0, largest).sign()))  # the sign of an axis is arbitrary
    return torch.stack(maps, 1)


def _umap(vectors: Tensor, seed: int) -> Tensor:
    require_packages("umap", extra="umap", location='method="umap"')
    from umap import UMAP

    reducer = UMAP(n_components=2, n_neighbors=min(15, len(vectors) - 1), metric="cosine", random_state=seed, n_jobs=1)
    return torch.from_numpy(reducer.fit_transform(vectors.numpy())).float()


def neighbour_agreement(vectors: Tensor, labels: Sequence[str]) -> Tensor:
    """(layers,) fraction of occurrences whose nearest other occurrence, by cosine, has the same label; for (n, layers,
    hidden) vectors and n labels."""
    names = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    ids = torch.tensor([names[label] for label in labels])
    agreement = []
    for layer in F.normalize(vectors.float(), dim=-1).unbind(1):
        cosines = layer @ layer.T
        cosines.fill_diagonal_(-torch.inf)
        agreement.append((ids[cosines.argmax(1)] == ids).double().mean())
    return torch.stack(agreement)


def context_text(words: Sequence[str], occurrence: Occurrence, size: int = _CONTEXT_WORDS) -> str:
    """The words around an occurrence, which is in square brackets."""
    start, stop = max(0, occurrence.start - size), occurrence.stop + size
    text = [*words[start : occurrence.start], f"[{' '.join(words[occurrence.start : occurrence.stop])}]"]
    text += words[occurrence.stop : stop]
    return " ".join(["..."] * (start > 0) + text + ["..."] * (stop < len(words)))


def nearest_occurrences(
    corpus: EncodedCorpus, queries: Sequence[Occurrence], layer: int = -1, number: int = 10
) -> list[list[tuple[Occurrence, float]]]:
    """The words in context that are nearest to words in context, by cosine.

    Args:
        corpus: Encoded sentences, which also contain the queries.
        queries: Occurrences of one word each.
        layer: Index of the layer in `corpus.vectors`.
        number: Neighbours of each query, which are not of its sentence.

    Returns:
        For each query its neighbours with their cosines, the nearest first.
    """
    rows = torch.tensor([int(corpus.starts[query.sentence]) + query.start for query in queries])
    targets = F.normalize(corpus.vectors[rows, layer].float(), dim=-1)
    scores, indices = [], []
    chunk_size = max(1, _MAX_SCORES // max(len(queries), corpus.vectors.shape[-1]))
    for start in range(0, len(corpus.vectors), chunk_size):
        chunk = slice(start, start + chunk_size)
        cosines = targets @ F.normalize(corpus.vectors[chunk, layer].float(), dim=-1).T
        cosines[:, ~corpus.has_tokens[chunk]] = -torch.inf
        for row, query in enumerate(queries):
            first, last = corpus.starts[query.sentence : query.sentence + 2].tolist()
            cosines[row, max(0, first - start) : max(0, last - start)] = -torch.inf
        best = cosines.topk(min(number, cosines.shape[1]))
        scores.append(best.values)
        indices.append(best.indices + start)
    best = torch.cat(scores, 1).topk(min(number, sum(score.shape[1] for score in scores)))
    chosen = torch.cat(indices, 1).gather(1, best.indices)
    sentence_numbers = torch.searchsorted(corpus.starts, chosen, right=True) - 1
    words = chosen - corpus.starts[sentence_numbers]
    return [
        [
            (Occurrence(sentence, word, word + 1), score)
            for sentence, word, score in zip(*row, strict=True)
            if score > -torch.inf
        ]
        for row in zip(sentence_numbers.tolist(), words.tolist(), best.values.tolist())
    ]


@dataclass(frozen=True)
class SenseAccuracy:
    """Accuracy of word sense disambiguation on held-out files.

    Attributes:
        layers: Numbers of the layers.
        accuracy: (splits, layers) accuracy of the nearest mean of a sense.
        most_frequent: (splits,) accuracy of the most frequent sense in the training files.
        upper_bound: (splits,) fraction of the instances one of whose senses is in the training files, or is the first
            one of a lemma that is not.
        instances: Number of test instances of each split.
        lemmas: Number of ambiguous lemmas.
    """

    layers: tuple[int, ...]
    accuracy: Tensor
    most_frequent: Tensor
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
    progress: bool = True,
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
        progress: Show a progress bar.

    Raises:
        CtxError: There are fewer than two files, or no ambiguous lemma.
    """
    files = sorted({sentence.file for sentence in sentences})
    senses_by_lemma: dict[str, set[str]] = defaultdict(set)
    for sentence in sentences:
        for instance in sentence.instances:
            senses_by_lemma[instance.lemma].update(instance.senses)
    lemmas = sorted(lemma for lemma, senses in senses_by_lemma.items() if len(senses) > 1)
    if len(files) < 2 or not lemmas:
        raise CtxError(
            f"There are {len(files)} files with {len(lemmas)} ambiguous lemmas.",
            hint="use several files with words of two or more senses.",
        )
    if max_lemmas is not None and max_lemmas < len(lemmas):
        lemmas = random.Random(0).sample(lemmas, max_lemmas)
    instances_by_lemma: dict[str, list[int]] = {lemma: [] for lemma in lemmas}
    occurrences: list[Occurrence] = []
    instances: list[SenseInstance] = []
    for number, sentence in enumerate(sentences):
        for instance in sentence.instances:
            if instance.lemma in instances_by_lemma:
                instances_by_lemma[instance.lemma].append(len(instances))
                instances.append(instance)
                occurrences.append(Occurrence(number, instance.start, instance.stop))
    words = [sentence.words for sentence in sentences]
    vectors, _ = encode_occurrences(encoder, words, occurrences, dtype=torch.float16, progress=progress)

    accuracies, most_frequent, upper_bounds, sizes = [], [], [], []
    for seed in seeds:
        size = min(len(files) - 1, max(1, round(test_fraction * len(files))))
        test_files = set(random.Random(seed).sample(files, size))
        is_test = torch.tensor([sentences[number].file in test_files for number, *_ in occurrences])
        counts = torch.zeros(len(encoder.layers) + 2, dtype=torch.float64)
        for indices in instances_by_lemma.values():
            rows = torch.tensor(indices)
            counts += _lemma_scores(vectors[rows], [instances[index] for index in indices], is_test[rows])
        sizes.append(int(is_test.sum()))
        counts /= sizes[-1]
        accuracies.append(counts[2:])
        most_frequent.append(counts[0])
        upper_bounds.append(counts[1])
    return SenseAccuracy(
        layers=encoder.layers,
        accuracy=torch.stack(accuracies),
        most_frequent=torch.stack(most_frequent),
        upper_bound=torch.stack(upper_bounds),
        instances=sizes,
        lemmas=len(lemmas),
    )


def _lemma_scores(vectors: Tensor, instances: Sequence[SenseInstance], is_test: Tensor) -> Tensor:
    """Numbers of test instances of a lemma that are correct by the most frequent sense, whose senses are in the
    training files, and that are correct by the nearest mean in each layer; for (n, layers, hidden) vectors."""
    training, test = (torch.nonzero(selected)[:, 0].tolist() for selected in (~is_test, is_test))
    num_layers = vectors.shape[1]
    if not training:
        return torch.full((num_layers + 2,), float(sum(instances[index].is_first_sense for index in test)))
    # the first sense of WordNet first: it wins ties of the frequency
    by_rank = sorted(training, key=lambda index: not instances[index].is_first_sense)
    frequencies = Counter(instances[index].senses[0] for index in by_rank)
    senses = [sense for sense, _ in frequencies.most_common()]
    gold = torch.tensor([[sense in instances[index].senses for sense in senses] for index in test]).view(
        -1, len(senses)
    )
    ids = torch.tensor([senses.index(instances[index].senses[0]) for index in training])
    sums = torch.zeros(len(senses), *vectors.shape[1:]).index_add_(0, ids, vectors[training].float())
    means = F.normalize(sums, dim=-1)  # the length of a mean does not matter for cosines
    predictions = torch.einsum("nlh,slh->lns", vectors[test].float(), means).argmax(-1)
    correct = gold.expand(num_layers, -1, -1).gather(2, predictions[..., None]).sum((1, 2))
    return torch.cat([gold[:, :1].sum()[None], gold.any(1).sum()[None], correct]).double()
