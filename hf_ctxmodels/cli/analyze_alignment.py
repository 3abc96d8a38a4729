r"""Alignment of two languages by an orthogonal map of their sentence vectors, by layer (Wu et al. 2019).

    hf-ctxmodels analyze alignment --model runs/bert-en runs/bert-de --text train.en.gz train.de.gz \
        --output_dir runs/analysis
    hf-ctxmodels analyze alignment --model runs/xlm-r --text verses.en.txt verses.de.txt --output_dir runs/analysis
    hf-ctxmodels analyze alignment --model runs/xlm --languages en de --text tatoeba.en-de.tsv --output_dir analysis

The files have one sentence per line, and the same line is its translation; or one file has a sentence and its
translation per line, separated by a tab. The map is fitted on some pairs; the table has the accuracy of the retrieval
of translations among the test pairs, and the similarity (CKA) of the two languages.
"""

from dataclasses import asdict, dataclass, replace
from itertools import zip_longest

from hf_ctxmodels.analysis.alignment import LayerAlignment, align_languages
from hf_ctxmodels.analysis.figures import LineChart
from hf_ctxmodels.analysis.results import AnalysisResult, Table, mean_and_std
from hf_ctxmodels.analysis.word_arguments import WordAnalysisArguments
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.devices import DeviceArguments
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range, flag
from hf_ctxmodels.data.table_files import read_table
from hf_ctxmodels.data.text_files import read_lines


@dataclass
class AlignmentArguments(WordAnalysisArguments):
    """Models, text and output."""

    train_pairs: int = flag(2000, "Number of training pairs for the map.")
    test_pairs: int = flag(1000, "Number of test pairs.")
    languages: list[str] = flag((), "Languages of the two texts, for a model with language embeddings or vocabularies.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "train_pairs", at_least=2)
        check_range(self, "test_pairs", at_least=4)
        if len(self.model) > 2:
            raise CtxError("Expected two models, or a multilingual one.", location="--model", hint="remove some.")
        if len(self.text) not in (1, 2):
            raise CtxError(
                "Expected two files of translations, or a file of pairs.",
                location="--text",
                hint="use FILE FILE, or a FILE with two columns.",
            )
        if self.languages and (len(self.languages) != 2 or len(self.model) != 1):
            raise CtxError(
                "Expected one multilingual model and two languages.",
                location="--languages",
                hint="use, for example, en de.",
            )


def main() -> None:
    """Align the languages, and save a table and a line chart."""
    arguments, placement = parse_arguments(
        AlignmentArguments, DeviceArguments, description=__doc__, essential=("model", "text", "output_dir")
    )
    arguments.check_output("alignment")
    pairs = read_translation_pairs(*arguments.text)
    # a model that reads two languages is loaded twice: its configuration and its tokenizer have one language
    loaded = replace(arguments, model=arguments.model * 2, languages=[]) if arguments.languages else arguments
    _, encoders = zip(*loaded.encoders(placement, languages=arguments.languages))
    alignment = align_languages(
        encoders[0],
        encoders[-1],
        pairs,
        train_pairs=arguments.train_pairs,
        test_pairs=arguments.test_pairs,
        seeds=arguments.seeds,
    )
    arguments.save(alignment_result(alignment, arguments.model, {**asdict(arguments), "pairs": len(pairs)}))


def read_translation_pairs(first: str, second: str | None = None) -> list[tuple[str, str]]:
    """The lines of two files, or the two columns of one, without pairs that have an empty side; raises CtxError if one
    file has more lines, or a line has no tab."""
    if second is None:
        rows = read_table(first, ["1", "2"], suffix=".tsv")
        return [
            (row.values["1"], row.values["2"]) for row in rows if row.values["1"].strip() and row.values["2"].strip()
        ]
    pairs = list(zip_longest(*(map(str.strip, read_lines(file)) for file in (first, second))))
    if pairs and None in pairs[-1]:
        raise CtxError("The files differ in the number of lines.", location=f"{first}, {second}", hint="align them.")
    return [(source, target) for source, target in pairs if source and target]


def alignment_result(alignment: LayerAlignment, models: list[str], settings: dict[str, object]) -> AnalysisResult:
    """A table of the layers, and a chart of the accuracies and CKA."""
    measures = {
        "retrieval, mapped": alignment.accuracy_mapped,
        "retrieval, not mapped": alignment.accuracy_unmapped,
        "CKA": alignment.cka,
    }
    statistics = {name: mean_and_std(values) for name, values in measures.items()}
    means = {name: mean for name, (mean, _) in statistics.items()}
    rows = [f"layer {i}" if i == j else f"layers {i}, {j}" for i, j in alignment.layers]
    note = (
        f"Means of word vectors. {alignment.train_pairs:,} pairs fit the map, {alignment.test_pairs:,} test it; "
        f"chance {1 / alignment.test_pairs:.4f}."
    )
    table = Table(
        title="Retrieval of translations by an orthogonal map",
        columns=list(measures),
        rows=rows,
        cells=list(zip(*means.values())),
        spreads=list(zip(*(spread for _, spread in statistics.values()))) if len(alignment.cka) > 1 else None,
        best="max",
        note=note,
    )
    layers = [first for first, _ in alignment.layers]
    chart = LineChart(
        "retrieval", "Alignment of two languages by layer", layers, means,
        x_label="layer", y_label="accuracy, or CKA", caption=note,
    )  # fmt: skip
    values = {name: {"mean": mean, "spread": spread} for name, (mean, spread) in statistics.items()}
    return AnalysisResult("alignment", models, settings, [table], [chart], {"layers": alignment.layers, **values})
