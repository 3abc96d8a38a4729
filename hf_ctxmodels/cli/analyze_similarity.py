"""Similarity of the representations of words in all layers of several models.

    hf-ctxmodels analyze similarity --model runs/bert runs/gpt2 runs/elmo --text dev.conllu --output_dir runs/analysis

All layers of all models are compared on the same words in the same sentences; the tokenizers may differ. The output is
one square heat map of debiased linear CKA, or also of SVCCA and neuron-wise maximum correlation.
"""

from dataclasses import asdict, dataclass

from hf_ctxmodels.analysis.figures import Figure, Heatmap
from hf_ctxmodels.analysis.results import AnalysisResult, Table, mean_and_std
from hf_ctxmodels.analysis.sentences import read_sentences
from hf_ctxmodels.analysis.similarity import MEASURES, LayerSimilarities, compare_layers, independent_correlation
from hf_ctxmodels.analysis.word_arguments import WordAnalysisArguments, short_names
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.devices import DeviceArguments
from hf_ctxmodels.core.flags import check_range, flag

_TITLES = {
    "cka": "Debiased linear CKA of layers",
    "svcca": "SVCCA of layers",
    "neurons": "Neuron-wise maximum correlation of layers",
}
_CAPTIONS = {
    "cka": "1: equal up to rotation and scale; 0: as similar as independent vectors.",
    "svcca": "Mean canonical correlation of the components with 99% of the variance; above 0 for independent vectors.",
    "neurons": "Mean over the neurons of the row's layer of the largest correlation with a neuron of the column's.",
}
_MAX_CORRELATION = 0.5  # of independent neurons, without a warning


@dataclass
class SimilarityArguments(WordAnalysisArguments):
    """Models, text and output."""

    measures: list[str] = flag(("cka",), "Measures.", choices=list(MEASURES))
    max_words: int = flag(2000, "Number of words that are compared, for each seed.")
    untrained: bool = flag(False, "Add each model with untrained weights.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "max_words", at_least=4)
        self.require_text()


def main() -> None:
    """Compare the layers, and save the matrices and heat maps."""
    arguments, placement = parse_arguments(
        SimilarityArguments, DeviceArguments, description=__doc__, essential=("model", "text", "output_dir")
    )
    arguments.check_output("similarity")
    sentences = read_sentences(arguments.text)
    similarities = compare_layers(
        (encoder for _, encoder in arguments.encoders(placement, untrained=arguments.untrained)),
        sentences,
        measures=arguments.measures,
        max_words=arguments.max_words,
        seeds=arguments.seeds,
    )
    settings = {**asdict(arguments), "sentences": len(sentences), "words": similarities.words}
    names = short_names(arguments.model)
    if arguments.untrained:
        names = [text for name in names for text in (name, f"{name}, untrained")]
    result = similarity_result(similarities, names, arguments.model, settings)
    arguments.save(result, summary=f"{similarities.words:,} words; results and figures")
    level = independent_correlation(similarities.words, similarities.neurons)
    if "neurons" in arguments.measures and level > _MAX_CORRELATION:
        print(
            f"warning: {similarities.words:,} words are few: with {similarities.neurons} neurons, the neuron-wise "
            f"maximum correlation of independent layers is about {level:.2f}; hint: compare more words (--text, "
            "--max_words)."
        )


def similarity_result(
    similarities: LayerSimilarities, names: list[str], models: list[str], settings: dict[str, object]
) -> AnalysisResult:
    """Heat maps of all layers, and a table of the most similar layer of each other model."""
    labels = [f"{names[model]} {layer}" for model, layer in zip(similarities.models, similarities.layers)]
    level = independent_correlation(similarities.words, similarities.neurons)
    captions = {**_CAPTIONS, "neurons": f"{_CAPTIONS['neurons']} About {level:.2f} for independent layers."}
    figures: list[Figure] = [
        Heatmap(
            measure, _TITLES[measure], labels, labels, samples.mean(0).tolist(), low=0.0, high=1.0,
            caption=f"{similarities.words:,} words; layers of each model from 0, the embeddings. {captions[measure]}",
        )
        for measure, samples in similarities.matrices.items()
    ]  # fmt: skip
    measure, samples = next(iter(similarities.matrices.items()))
    matrix, spread = samples.mean(0), mean_and_std(samples)[1]
    cells, spreads = [], []
    for row in range(len(labels)):
        row_cells: list[float | str] = []
        row_spreads: list[float | None] = []
        for model in range(len(names)):
            columns = [column for column, number in enumerate(similarities.models) if number == model and column != row]
            if not columns:
                row_cells, row_spreads = [*row_cells, "", ""], [*row_spreads, None, None]
                continue
            best = max(columns, key=lambda column: float(matrix[row, column].nan_to_num(-1)))
            row_cells += [str(similarities.layers[best]), float(matrix[row, best])]
            row_spreads += [None, spread[row][best]]
        cells.append(row_cells)
        spreads.append(row_spreads)
    table = Table(
        title=f"Most similar other layer of each model: {_TITLES[measure]}",
        columns=[column for name in names for column in (f"layer of {name}", "similarity")],
        rows=labels,
        cells=cells,
        spreads=spreads if len(samples) > 1 else None,
    )
    values = {
        "labels": labels,
        **{
            measure: dict(zip(("mean", "spread"), mean_and_std(matrices)))
            for measure, matrices in similarities.matrices.items()
        },
    }
    return AnalysisResult("similarity", models, settings, [table], figures, values)
