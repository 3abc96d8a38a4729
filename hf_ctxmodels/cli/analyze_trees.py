r"""Dependency trees in the space of a structural probe: maps of sentences, lengths of relations (Coenen et al. 2019).

    hf-ctxmodels analyze trees --model runs/bert runs/gpt2 --train_file train.conllu --test_file dev.conllu \
        --output_dir runs/analysis

A probe is trained on one layer of each model, so that squared distances between words approximate distances in the
tree. The bar chart has the mean squared length of the arcs of each relation, ideally 1; a map has the words of a
sentence, its arcs, and dotted lines for wrong edges of the minimum spanning tree.
"""

from dataclasses import asdict, dataclass, fields

from hf_ctxmodels.analysis.figures import BarChart, Figure, ScatterMap
from hf_ctxmodels.analysis.probing.training import ProbeTraining
from hf_ctxmodels.analysis.results import AnalysisResult, Table, mean_and_std
from hf_ctxmodels.analysis.trees import TreeSpace, fit_tree_spaces
from hf_ctxmodels.analysis.word_arguments import WordAnalysisArguments
from hf_ctxmodels.architectures.word_encoder import WordEncoder
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.console import format_count
from hf_ctxmodels.core.devices import DeviceArguments
from hf_ctxmodels.core.flags import REQUIRED, check_range, flag
from hf_ctxmodels.data.treebanks import read_treebank

_MAP_LENGTHS = range(6, 15)  # words of a sentence that is drawn


@dataclass(kw_only=True)
class TreeArguments(WordAnalysisArguments):
    """Models, treebank and output."""

    train_file: str = flag(REQUIRED, "CoNLL-U file on which the probe is trained.")
    test_file: str = flag(REQUIRED, "CoNLL-U file for the maps and the lengths of arcs.")
    layer: int | None = flag(None, "Layer of all models; by default the middle one of each.")
    rank: int = flag(64, "Rank of the probe.")
    epochs: int = flag(5, "Passes over the training sentences.")
    max_sentences: int = flag(2000, "Use the first N sentences of both files.")
    min_arcs: int = flag(20, "Minimum number of arcs of a relation in the bar chart.")
    max_figures: int = flag(3, "Number of sentences to draw: the first ones of 6 to 14 words.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "rank", "epochs", at_least=1)
        check_range(self, "max_sentences", at_least=10)
        check_range(self, "max_figures", at_least=0)


def main() -> None:
    """Train the probes, and save a table, the bar chart and the maps."""
    names = {entry.name for entry in fields(TreeArguments)} - {"text"}
    arguments, placement = parse_arguments(
        (TreeArguments, names),
        DeviceArguments,
        description=__doc__,
        essential=("model", "train_file", "test_file", "output_dir"),
    )
    arguments.check_output("trees")
    train, test = (
        read_treebank(file)[: arguments.max_sentences] for file in (arguments.train_file, arguments.test_file)
    )
    spaces = {}
    for name, encoder in arguments.encoders(placement):
        layer = encoder.num_layers // 2 if arguments.layer is None else arguments.layer
        layer_encoder = WordEncoder(encoder.base_model, encoder.tokenizer, layers=[layer], pooling=encoder.pooling)
        spaces[name] = fit_tree_spaces(
            layer_encoder,
            train,
            test,
            rank=arguments.rank,
            seeds=arguments.seeds,
            training=ProbeTraining(epochs=arguments.epochs),
        )
    settings = {**asdict(arguments), "train_sentences": len(train), "test_sentences": len(test)}
    arguments.save(tree_result(spaces, arguments.model, settings, arguments.min_arcs, arguments.max_figures))


def tree_result(
    spaces: dict[str, list[TreeSpace]], models: list[str], settings: dict[str, object], min_arcs: int, max_figures: int
) -> AnalysisResult:
    """Lengths of the relations in all models, and maps of the first sentences in each, of the first seed."""
    [first_space, *_] = next(iter(spaces.values()))
    counts = {relation: len(values) for relation, values in first_space.edge_lengths().items()}
    relations = [relation for relation, count in counts.items() if count >= min_arcs]
    lengths, uuas = {}, {}
    for name, seed_spaces in spaces.items():
        seed_lengths = [space.edge_lengths() for space in seed_spaces]
        lengths[name] = {
            relation: mean_and_std([float(values[relation].mean()) for values in seed_lengths]) for relation in counts
        }
        uuas[name] = mean_and_std([space.uuas for space in seed_spaces])
    relations.sort(key=lambda relation: next(iter(lengths.values()))[relation][0])
    columns = {name: [values[relation] for relation in relations] for name, values in lengths.items()}
    texts = [
        f"{name} {mean:.3f}{'' if std is None else f' ± {std:.3f}'} (layer {spaces[name][0].layer})"
        for name, (mean, std) in uuas.items()
    ]
    note = f"UUAS: {', '.join(texts)}."
    num_seeds = len(next(iter(spaces.values())))
    table = Table(
        title="Mean squared length of the arcs of a relation",
        columns=["arcs", *spaces],
        rows=relations,
        cells=[[counts[relation], *(values[relation][0] for values in lengths.values())] for relation in relations],
        spreads=[[None, *(values[relation][1] for values in lengths.values())] for relation in relations],
        note=f"{note} {format_count(num_seeds, 'seed')}.",
    )
    chart = BarChart(
        "lengths", "Squared length of dependencies", relations,
        {name: [mean for mean, _ in statistics] for name, statistics in columns.items()},
        x_label="mean squared length", digits=2,
        caption=f"In the space of a structural probe, where 1 is ideal. {note}",
    )  # fmt: skip
    figures: list[Figure] = [chart]
    for number, (name, [space, *_]) in enumerate(spaces.items()):
        indices = [i for i, sentence in enumerate(space.sentences) if len(sentence.words) in _MAP_LENGTHS]
        figures += [_tree_figure(space, index, f"tree-{number}-{index}", name) for index in indices[:max_figures]]
    values = {
        name: {
            "layer": seed_spaces[0].layer,
            "uuas": dict(zip(("mean", "spread"), uuas[name])),
            "lengths": {relation: dict(zip(("mean", "spread"), pair)) for relation, pair in lengths[name].items()},
        }
        for name, seed_spaces in spaces.items()
    }
    return AnalysisResult("trees", models, settings, [table], figures, values)


def _tree_figure(space: TreeSpace, index: int, figure_name: str, model_name: str) -> ScatterMap:
    sentence, vectors = space.sentences[index], space.points[index]
    points, edges = space.tree_map(index)
    texts = []
    for word, (form, head, relation) in enumerate(zip(sentence.words, sentence.heads, sentence.relations)):
        squared = "" if head < 0 else f", squared length {float((vectors[word] - vectors[head]).square().sum()):.2f}"
        texts.append(f"{form}: {relation}{squared}")
    depths = sentence.depths()
    order = sorted(range(len(depths)), key=lambda word: depths[word])  # of the legend
    rank = {word: position for position, word in enumerate(order)}
    return ScatterMap(
        figure_name, f"Dependency tree in layer {space.layer}, {model_name}", points[order].tolist(),
        [f"depth {depths[word]}" for word in order], [texts[word] for word in order],
        [sentence.words[word] for word in order],
        edges=[(rank[first], rank[second], style) for first, second, style in edges],
        caption="Principal components in the space of a structural probe, with the depth of words in the tree. Solid: "
        "arcs of the treebank; dotted: wrong edges of the minimum spanning tree.",
    )  # fmt: skip
