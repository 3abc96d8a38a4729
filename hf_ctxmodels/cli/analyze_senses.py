"""Senses of words by layer: maps of the occurrences of a word, and word sense disambiguation on SemCor.

    hf-ctxmodels analyze senses --model runs/bert --text corpus.txt --word bank --output_dir runs/analysis
    hf-ctxmodels analyze senses --model runs/bert --semcor semcor.tar.gz --output_dir runs/analysis
    hf-ctxmodels analyze senses --model runs/bert --semcor semcor.tar.gz --word bank line --output_dir runs/analysis

A map has a point for each occurrence, with its sentence on hover; the senses of SemCor and the tags of CoNLL-U files
are colors. Without --word, the senses of SemCor are predicted by the nearest mean vector of a sense in training files
(Peters et al. 2018), in each layer, and compared with the most frequent sense.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hf_ctxmodels.analysis.disambiguation import (
    SenseAccuracy,
    SenseSentence,
    disambiguate,
    find_sense_occurrences,
    read_semcor,
)
from hf_ctxmodels.analysis.figures import Figure, LineChart, ScatterMap
from hf_ctxmodels.analysis.results import AnalysisResult, Table, mean_and_std
from hf_ctxmodels.analysis.senses import (
    Occurrence,
    Projection,
    context_text,
    encode_occurrences,
    find_occurrences,
    neighbor_agreement,
    project,
)
from hf_ctxmodels.analysis.sentences import read_sentences
from hf_ctxmodels.analysis.word_arguments import WordAnalysisArguments
from hf_ctxmodels.architectures.word_alignment import Sentence, split_words
from hf_ctxmodels.architectures.word_encoder import WordEncoder
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.devices import DeviceArguments
from hf_ctxmodels.core.errors import CtxError, require_packages
from hf_ctxmodels.core.flags import check_range, flag
from hf_ctxmodels.data.treebanks import is_treebank, read_treebank

_MAX_GROUPS = 6  # colors of a map


@dataclass
class SenseArguments(WordAnalysisArguments):
    """Models, text and output."""

    semcor: str | None = flag(None, "Archive or folder of SemCor's tag files.", conflicts=("text",))
    word: list[str] = flag((), "Words to map; lemmas with --semcor.")
    projection: Projection = flag("pca", "Projection of the maps; umap needs the extra `umap`.")
    max_occurrences: int = flag(500, "Maximum number of occurrences of a word in a map; of more, a random sample.")
    probe_ranks: list[int] = flag(
        (), "Ranks of sense probes: trained linear maps of the last layer (Coenen et al. 2019)."
    )
    max_lemmas: int | None = flag(None, "Disambiguate a random sample of N ambiguous lemmas; by default all.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "max_occurrences", at_least=3)
        check_range(self, "max_lemmas", "probe_ranks", at_least=1)
        if bool(self.text) == (self.semcor is not None):
            raise CtxError("Expected either --text or --semcor.", location="--text", hint="use one of them.")
        if self.text and not self.word:
            raise CtxError("--text needs --word.", location="--word", hint="add, for example, --word bank.")
        if self.word and len(self.seeds) > 1:
            raise CtxError("A map has one seed.", location="--seeds", hint="use one seed with --word.")
        if self.word and self.probe_ranks:
            raise CtxError("Maps train no probes.", location="--probe_ranks", hint="remove --probe_ranks or --word.")
        if self.projection == "umap":
            require_packages("umap", extra="umap", location="--projection umap")


def main() -> None:
    """Map the words or disambiguate, and save tables and figures."""
    arguments, placement = parse_arguments(
        SenseArguments,
        DeviceArguments,
        description=__doc__,
        essential=("model", "text", "semcor", "word", "output_dir"),
    )
    analysis = "sense-maps" if arguments.word else "senses"
    arguments.check_output(analysis)
    tagged = None if arguments.semcor is None else read_semcor(arguments.semcor)
    sentences = read_sentences(arguments.text) if tagged is None else [sentence.words for sentence in tagged]
    settings = {**asdict(arguments), "sentences": len(sentences)}
    if arguments.word:
        result = _map_words(arguments, placement, sentences, tagged, settings)
    else:
        accuracies = {
            name: disambiguate(
                encoder,
                tagged or (),
                max_lemmas=arguments.max_lemmas,
                seeds=arguments.seeds,
                probe_ranks=arguments.probe_ranks,
            )
            for name, encoder in arguments.encoders(placement)
        }
        result = disambiguation_result(accuracies, arguments.model, settings)
    arguments.save(result)


def disambiguation_result(
    accuracies: dict[str, SenseAccuracy], models: list[str], settings: dict[str, Any]
) -> AnalysisResult:
    """A table of layers and models, and a line chart with the most frequent sense."""
    layers = sorted({layer for accuracy in accuracies.values() for layer in accuracy.layers})
    layer_rows = [f"layer {layer}" for layer in layers]
    probe_rows = [f"last layer, probe of rank {rank}" for rank in next(iter(accuracies.values())).probes]
    rows = ["most frequent sense", *layer_rows, *probe_rows, "upper bound"]
    columns: list[list[float | None]] = []
    spreads: list[list[float | None]] = []
    series: dict[str, Sequence[float | None]] = {}
    values: dict[str, Any] = {}
    for name, accuracy in accuracies.items():
        stacks = [
            accuracy.most_frequent,
            *accuracy.accuracy.unbind(1),
            *accuracy.probes.values(),
            accuracy.upper_bound,
        ]
        names = [rows[0], *(f"layer {layer}" for layer in accuracy.layers), *probe_rows, rows[-1]]
        statistics = {row: mean_and_std(stack) for row, stack in zip(names, stacks)}
        means = {row: mean for row, (mean, _) in statistics.items()}
        deviations = {row: deviation for row, (_, deviation) in statistics.items()}
        columns.append([means.get(row) for row in rows])
        spreads.append([deviations.get(row) for row in rows])
        series[name] = columns[-1][1 : len(layers) + 1]
        values[name] = {"mean": means, "spread": deviations, "instances": accuracy.instances, "lemmas": accuracy.lemmas}
    first = next(iter(accuracies.values()))
    series["most frequent sense"] = [float(first.most_frequent.mean())] * len(layers)
    note = f"{first.lemmas:,} ambiguous lemmas, {min(first.instances):,} to {max(first.instances):,} test instances."
    table = Table(
        title="Accuracy of word sense disambiguation by the nearest mean of a sense",
        columns=list(accuracies),
        rows=rows,
        cells=list(zip(*columns)),
        spreads=list(zip(*spreads)) if len(first.most_frequent) > 1 else None,
        note=note,
    )
    chart = LineChart(
        "accuracy", "Word sense disambiguation by layer", layers, series, x_label="layer", y_label="accuracy",
        caption=f"Nearest mean vector of a sense in the training files of SemCor. {note}",
    )  # fmt: skip
    return AnalysisResult("senses", models, settings, [table], [chart], values)


def _map_words(
    arguments: SenseArguments,
    placement: DeviceArguments,
    sentences: Sequence[Sentence],
    tagged: Sequence[SenseSentence] | None,
    settings: dict[str, Any],
) -> AnalysisResult:
    size, seed = arguments.max_occurrences, arguments.seeds[0]
    tags = None
    if tagged is None and all(map(is_treebank, arguments.text)):
        tags = [sentence.upos for file in arguments.text for sentence in read_treebank(file)]
    occurrences = {}
    for word in arguments.word:
        if tagged is not None:
            occurrences[word] = find_sense_occurrences(tagged, word, size, seed)
        else:
            occurrences[word] = find_occurrences(sentences, word, size, seed, tags=tags)
    settings["occurrences"] = {word: len(entries) for word, entries in occurrences.items()}
    tables: list[Table] = []
    figures: list[Figure] = []
    for model_number, (name, encoder) in enumerate(arguments.encoders(placement)):
        for word_number, (word, entries) in enumerate(occurrences.items()):
            title = f"{word}, {name}" if len(arguments.model) > 1 else word
            figure_name = f"map-{word_number}-{model_number}"
            word_tables, word_figures = map_word(
                encoder, sentences, entries, title, figure_name, arguments.projection, seed
            )
            tables += word_tables
            figures += word_figures
    values = {figure.name: figure.points for figure in figures if isinstance(figure, ScatterMap)}
    return AnalysisResult("sense-maps", arguments.model, settings, tables, figures, values)


def map_word(
    encoder: WordEncoder,
    sentences: Sequence[Sentence],
    occurrences: Sequence[Occurrence],
    title: str,
    figure_name: str,
    method: Projection,
    seed: int,
) -> tuple[list[Table], list[ScatterMap]]:
    """A map of each layer, and for labeled occurrences the agreement of nearest neighbors."""
    vectors, has_tokens = encode_occurrences(encoder, sentences, occurrences)
    occurrences = [occurrence for occurrence, encoded in zip(occurrences, has_tokens.tolist()) if encoded]
    vectors = vectors[has_tokens]
    frequent = [label for label, _ in Counter(occurrence.label for occurrence in occurrences).most_common(_MAX_GROUPS)]
    order = {label: number for number, label in enumerate(frequent)}
    rows = sorted(range(len(occurrences)), key=lambda row: order.get(occurrences[row].label, len(order)))
    occurrences, vectors = [occurrences[row] for row in rows], vectors[rows]  # in the order of the legend
    groups = [occurrence.label if occurrence.label in order else "other" for occurrence in occurrences]
    texts = [context_text(split_words(sentences[occurrence.sentence]), occurrence) for occurrence in occurrences]
    figures = [
        ScatterMap(
            f"{figure_name}-{layer}", f"{title}, layer {layer}", points.tolist(), groups, texts,
            caption=f"{len(texts)} occurrences, {method.upper()} of their vectors.",
        )
        for layer, points in zip(encoder.layers, project(vectors, method, seed).unbind(1))
    ]  # fmt: skip
    if len(frequent) < 2:
        return [], figures
    labels = [occurrence.label for occurrence in occurrences]
    agreement = neighbor_agreement(vectors, labels).tolist()
    majority = Counter(labels).most_common(1)[0][1] / len(labels)
    table = Table(
        title=f"Nearest neighbors with the same sense or tag: {title}",
        columns=["agreement"],
        rows=[*(f"layer {layer}" for layer in encoder.layers), "most frequent"],
        cells=[*([value] for value in agreement), [majority]],
        note=f"{len(labels)} occurrences with {len(set(labels))} senses or tags.",
    )
    return [table], figures
