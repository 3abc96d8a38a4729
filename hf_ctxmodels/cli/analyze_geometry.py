"""Anisotropy, self-similarity and intra-sentence similarity of the vectors of words, by layer (Ethayarajh 2019).

    hf-ctxmodels analyze geometry --model runs/bert runs/gpt2 --text dev.conllu --output_dir runs/analysis

Similarities are cosines, raw and corrected by the anisotropy of the layer.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from hf_ctxmodels.analysis.figures import LineChart
from hf_ctxmodels.analysis.geometry import LayerGeometry, measure_geometry
from hf_ctxmodels.analysis.results import AnalysisResult, Table, mean_and_std
from hf_ctxmodels.analysis.sentences import read_sentences
from hf_ctxmodels.analysis.word_arguments import WordAnalysisArguments
from hf_ctxmodels.architectures.word_alignment import split_words
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.devices import DeviceArguments
from hf_ctxmodels.core.flags import check_range, flag

_CHARTS = {
    "anisotropy": ("Anisotropy", "Mean cosine of words of different sentences; 0 if directions are uniform."),
    "self-similarity": ("Self-similarity", "Mean cosine of the occurrences of a word; lower is more contextual."),
    "self-similarity-corrected": ("Self-similarity, corrected", "Self-similarity minus anisotropy."),
    "intra-sentence": ("Intra-sentence similarity", "Mean cosine of a word and its sentence's mean vector."),
    "intra-sentence-corrected": ("Intra-sentence similarity, corrected", "The similarity minus anisotropy."),
}
_NUM_WORDS = 10


@dataclass
class GeometryArguments(WordAnalysisArguments):
    """Models, text and output."""

    min_occurrences: int = flag(5, "Minimum number of occurrences of a word for its self-similarity.")
    sample_size: int = flag(1000, "Number of sentences, with one sampled word each, for the anisotropy.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "min_occurrences", "sample_size", at_least=2)
        self.require_text()


def main() -> None:
    """Measure the models, and save tables and line charts."""
    arguments, placement = parse_arguments(
        GeometryArguments, DeviceArguments, description=__doc__, essential=("model", "text", "output_dir")
    )
    arguments.check_output("geometry")
    sentences = read_sentences(arguments.text)
    geometries = {
        name: measure_geometry(
            encoder,
            sentences,
            min_occurrences=arguments.min_occurrences,
            sample_size=arguments.sample_size,
            seeds=arguments.seeds,
        )
        for name, encoder in arguments.encoders(placement)
    }
    words = sum(len(split_words(sentence)) for sentence in sentences)
    settings = {**asdict(arguments), "sentences": len(sentences), "words": words}
    arguments.save(geometry_result(geometries, arguments.model, settings), num_printed=len(geometries))


def layer_values(geometry: LayerGeometry) -> dict[str, list[float]]:
    """The measures of each layer, by the names of the charts."""
    anisotropy = geometry.anisotropy.mean(0)
    self_similarity = geometry.self_similarity.mean(0)
    return {
        "anisotropy": anisotropy.tolist(),
        "self-similarity": self_similarity.tolist(),
        "self-similarity-corrected": (self_similarity - anisotropy).tolist(),
        "intra-sentence": geometry.intra_sentence.tolist(),
        "intra-sentence-corrected": (geometry.intra_sentence - anisotropy).tolist(),
    }


def geometry_result(
    geometries: dict[str, LayerGeometry], models: list[str], settings: dict[str, object]
) -> AnalysisResult:
    """Tables of the layers and of the most and the least contextual words; a chart of each measure."""
    measures = {name: layer_values(geometry) for name, geometry in geometries.items()}
    layers = sorted({layer for geometry in geometries.values() for layer in geometry.layers})
    figures = []
    for chart, (title, caption) in _CHARTS.items():
        series: dict[str, Sequence[float | None]] = {}
        for name, geometry in geometries.items():
            by_layer = dict(zip(geometry.layers, measures[name][chart]))
            series[name] = [by_layer.get(layer) for layer in layers]
        figures.append(LineChart(chart, title, layers, series, x_label="layer", y_label="cosine", caption=caption))
    tables, word_tables, values = [], [], {}
    for name, geometry in geometries.items():
        dominant = geometry.dominant_dimension.mean(0).tolist()
        rows = list(zip(*measures[name].values(), dominant))
        _, spread = mean_and_std(geometry.anisotropy)
        note = f"{len(geometry.words):,} words with self-similarity, {geometry.num_sentences:,} sentences."
        tables.append(
            Table(
                title=f"Cosines by layer: {name}",
                columns=[*(title for title, _ in _CHARTS.values()), "anisotropy of one dimension"],
                rows=[f"layer {layer}" for layer in geometry.layers],
                cells=rows,
                spreads=[[value, *[None] * len(_CHARTS)] for value in spread] if len(geometry.anisotropy) > 1 else None,
                note=note,
            )
        )
        last = geometry.self_similarity[:, -1]
        order = torch.argsort(last, stable=True).tolist()
        size = min(_NUM_WORDS, len(order) // 2)
        pairs = list(zip(order[:size], order[::-1][:size]))
        word_tables.append(
            Table(
                title=f"Words by self-similarity in the last layer: {name}",
                columns=["most contextual", "self-similarity", "least contextual", "self-similarity"],
                rows=[str(rank) for rank in range(1, size + 1)],
                cells=[
                    [geometry.words[low], float(last[low]), geometry.words[high], float(last[high])]
                    for low, high in pairs
                ],
            )
        )
        values[name] = {
            "layers": geometry.layers,
            **measures[name],
            "anisotropy-spread": spread,
            "dominant-dimension": dominant,
            "words": dict(zip(geometry.words, last.tolist())),
        }
    return AnalysisResult("geometry", models, settings, [*tables, *word_tables], figures, values)
