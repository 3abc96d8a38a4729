"""Attention heads of a model: measures, patterns, dependencies, distances and rollout.

    hf-ctxmodels analyze attention --model runs/bert --text dev.conllu --output_dir runs/analysis
    hf-ctxmodels analyze attention --model runs/gpt2 --text sentences.txt --output_dir runs/analysis

Consecutive sentences are read as pairs, in which attention can be limited to one of both. Treebanks in CoNLL-U also
show which head attends from words to their syntactic heads. Layers and heads are numbered from 0, as in
`--disabled_heads` of finetune.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.analysis.attention.dependencies import DependencyScores, score_dependencies
from hf_ctxmodels.analysis.attention.maps import attention_maps, rollout, word_attention
from hf_ctxmodels.analysis.attention.patterns import (
    AttentionInput,
    HeadProfile,
    Pattern,
    embed_heads_2d,
    head_distances,
    make_inputs,
    profile_heads,
)
from hf_ctxmodels.analysis.figures import AttentionView, Figure, Heatmap, ScatterMap
from hf_ctxmodels.analysis.output_arguments import OutputArguments
from hf_ctxmodels.analysis.results import AnalysisResult, Table
from hf_ctxmodels.analysis.sentences import read_sentences
from hf_ctxmodels.architectures.sentence_encoder import max_sentence_length
from hf_ctxmodels.architectures.word_alignment import Sentence, align_words, split_words
from hf_ctxmodels.core.attention_heads import PRUNED_HEADS, attention_layers
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.console import format_count, print_status, progress_bar
from hf_ctxmodels.core.constants import MAX_SEED
from hf_ctxmodels.core.devices import DeviceArguments
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, check_range, flag
from hf_ctxmodels.data.treebanks import TreebankSentence, is_treebank, read_treebank
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import load_model_and_tokenizer


@dataclass
class AttentionArguments(OutputArguments):
    """Model, text and output."""

    model: str = flag(REQUIRED, "Directory or Hub id of a Transformer, with its tokenizer.")
    text: list[str] = flag(
        REQUIRED, "Sentences: CoNLL-U treebanks, or .txt, .jsonl and .parquet files with a sentence per line or record."
    )
    max_sentences: int = flag(1000, "Use the first N sentences.")
    distance_sentences: int = flag(40, "Use the first N sentences for the distances between heads, the slowest part.")
    sentence: str | None = flag(None, "Sentence whose attention is drawn; by default the first of 6 to 12 words.")
    min_arcs: int = flag(20, "Minimum number of dependents of a relation in each half of the sentences.")
    seed: int = flag(0, "Seed of the map of heads.")

    def __post_init__(self) -> None:
        check_range(self, "max_sentences", "distance_sentences", at_least=2)
        check_range(self, "min_arcs", at_least=1)
        check_range(self, "seed", at_least=0, at_most=MAX_SEED)


def main() -> None:
    """Measure all heads, and save tables and figures."""
    arguments, placement = parse_arguments(
        AttentionArguments, DeviceArguments, description=__doc__, essential=("model", "text", "output_dir")
    )
    arguments.check_output("attention")
    treebank: list[TreebankSentence] = []
    sentences: list[Sentence]
    if all(map(is_treebank, arguments.text)):
        treebank = [sentence for file in arguments.text for sentence in read_treebank(file)][: arguments.max_sentences]
        sentences = [sentence.words for sentence in treebank]
    else:
        sentences = read_sentences(arguments.text)[: arguments.max_sentences]
    model, tokenizer = load_model_and_tokenizer(arguments.model, "AutoModel")
    placement.place(model)
    print_status(f"{type(model).__name__}: attention in {format_count(len(sentences), 'sentence')}")
    arguments.save(analyze(arguments, model.eval(), tokenizer, sentences, treebank))


def analyze(
    arguments: AttentionArguments,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[Sentence],
    treebank: list[TreebankSentence],
) -> AnalysisResult:
    """All tables and figures; `treebank` is empty without dependencies."""
    limit = max_sentence_length(model.base_model, tokenizer)
    texts = [sentence if isinstance(sentence, str) else " ".join(sentence) for sentence in sentences]
    inputs = make_inputs(tokenizer, texts, limit)
    bar = progress_bar(inputs, "measures of heads", unit="pairs", total=len(inputs))
    profile = profile_heads(model, tokenizer, bar)
    patterns = profile.classify()
    heads = _head_numbers(model, patterns)
    tables, figures = [_pattern_table(patterns), _strongest_heads(profile, heads)], _measure_figures(profile, heads)
    figures.append(_pattern_figure(patterns, heads))
    values: dict[str, Any] = {
        "measures": {name: value.tolist() for name, value in profile.measures.items()},
        "heads": heads,
        "attention_to_special_tokens": profile.attention_to_special_tokens.tolist(),
        "attention_to_neighbors": profile.attention_to_neighbors.tolist(),
        "within_segment_excess": profile.within_segment_excess.tolist(),
        "patterns": patterns,
    }
    if treebank:
        scores = score_dependencies(model, tokenizer, treebank, limit)
        table, figure, values["dependencies"] = _dependency_results(scores, arguments.min_arcs, heads)
        tables.append(table)
        figures += [figure] if figure else []
    distance_inputs = inputs[: max(1, arguments.distance_sentences // 2)]
    figure, values["distances"] = _distance_figure(model, tokenizer, distance_inputs, patterns, heads, arguments.seed)
    figures += [figure, *_sentence_figures(arguments.sentence, model, tokenizer, sentences, limit)]
    settings = {**asdict(arguments), "sentences": len(sentences), "pairs": len(inputs)}
    return AnalysisResult("attention", [arguments.model], settings, tables, figures, values)


def _head_numbers(model: PreTrainedModel, patterns: list[list[Pattern]]) -> list[tuple[int, ...]]:
    """Numbers of the heads of each layer, without pruned ones; only models of this package have pruned heads."""
    if not getattr(model.config, PRUNED_HEADS, None):
        return [tuple(range(len(row))) for row in patterns]
    layers = attention_layers(model)
    return [layers[str(layer)].heads for layer in range(len(patterns))]


def _pattern_table(patterns: list[list[Pattern]]) -> Table:
    names = get_args(Pattern)
    counts = [Counter(row) for row in patterns]
    cells = [[row[name] for name in names] for row in counts]
    total = [sum(column) for column in zip(*cells)]
    rows = [*(f"layer {layer}" for layer in range(len(patterns))), "all"]
    return Table("Patterns of the heads", names, rows, [*cells, total], note="Number of heads with each pattern.")


def _strongest_heads(profile: HeadProfile, heads: Sequence[tuple[int, ...]]) -> Table:
    rows: list[str] = []
    cells: list[list[object]] = []
    for name, values in profile.measures.items():
        index = int(values.flatten().argmax())
        layer, head = divmod(index, values.shape[1])
        rows.append(name)
        highest = float(values[layer, head])
        cells.append([f"{layer}:{heads[layer][head]}", highest, float(values.mean()), float(values.min())])
    columns = ["highest: layer:head", "highest", "mean", "lowest"]
    return Table("Attention of the heads", columns, rows, cells, note="Shares of the attention; entropy in nats.")


def _measure_figures(profile: HeadProfile, heads: Sequence[tuple[int, ...]]) -> list[Figure]:
    titles = {
        "self": ("Attention to the token itself", ""),
        "previous": ("Attention to the previous token", ""),
        "next": ("Attention to the next token", ""),
        "first": ("Attention to the first token", ""),
        "separator": ("Attention to separators", " Without separators, attention to the end of the sequence."),
        "punctuation": ("Attention to punctuation marks", ""),
        "entropy": ("Entropy of the attention (nats)", " Low if a head attends to few tokens."),
    }
    figures: list[Figure] = []
    for name, (title, note) in titles.items():
        values, high = profile.measures[name].tolist(), None if name == "entropy" else 1.0
        caption = f"Mean over the tokens, for each layer and head.{note}"
        figures.append(Heatmap.of_heads(name, title, heads, values, low=0.0, high=high, caption=caption))
    return figures


def _pattern_figure(patterns: list[list[Pattern]], heads: Sequence[tuple[int, ...]]) -> Figure:
    points, groups, texts = [], [], []
    for pattern in get_args(Pattern):
        for layer, row in enumerate(patterns):
            for head, name in zip(heads[layer], row, strict=True):
                if name == pattern:
                    points.append((head, layer))
                    groups.append(name)
                    texts.append(f"layer {layer}, head {head}: {name}")
    caption = "The pattern of each head by the rules of the documentation (after Kovaleva et al. 2019)."
    return ScatterMap(
        "patterns", "Patterns of the heads", points, groups, texts,
        x_label="head", y_label="layer", is_lattice=True, caption=caption,
    )  # fmt: skip


def _dependency_results(
    scores: DependencyScores, min_arcs: int, heads: Sequence[tuple[int, ...]]
) -> tuple[Table, Figure | None, list[dict]]:
    best = scores.best_heads(min_arcs)
    if not best:
        raise CtxError(
            f"No relation has {min_arcs} dependents in each half of the sentences.",
            location="--min_arcs",
            hint="use a larger treebank or a lower number.",
        )
    table = Table(
        "Best head of each relation",
        ["dependents", "layer:head", "direction", "accuracy", "offset", "accuracy of the offset", "difference"],
        [row.relation for row in best],
        [
            [
                *(row.count, f"{row.layer}:{heads[row.layer][row.head]}", row.direction, row.accuracy),
                *(f"{row.offset:+d}", row.offset_accuracy, row.accuracy - row.offset_accuracy),
            ]
            for row in best
        ],
        note="Head and offset are chosen on every other sentence and measured on the others. "
        f"Sentences that are too long or have a single word: {scores.num_skipped}.",
    )
    by_layer = [scores.accuracies(row.relation).amax(-1).tolist() for row in best]
    figure = Heatmap(
        "dependencies",
        "Best head of each layer by relation",
        [row.relation for row in best],
        [str(layer) for layer in range(len(by_layer[0]))],
        by_layer,
        low=0.0,
        high=1.0,
        row_label="relation",
        column_label="layer",
        caption="Share of dependents whose syntactic head has the most attention, in the best head of the layer.",
    )
    return table, figure, [asdict(row) | {"head": heads[row.layer][row.head]} for row in best]


def _distance_figure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: list[AttentionInput],
    patterns: list[list[Pattern]],
    heads: Sequence[tuple[int, ...]],
    seed: int,
) -> tuple[Figure, list[list[float]]]:
    bar = progress_bar(inputs, "distances of heads", unit="pairs", total=len(inputs))
    distances = head_distances(model, tokenizer, bar)
    names = [f"{layer}:{head}" for layer, row in enumerate(heads) for head in row]
    flat = [pattern for row in patterns for pattern in row]
    order = sorted(range(len(flat)), key=lambda index: get_args(Pattern).index(flat[index]))
    points = embed_heads_2d(distances, seed).tolist()
    figure = ScatterMap(
        "distances",
        "Heads by the distance of their attention",
        [points[index] for index in order],
        [flat[index] for index in order],
        [f"layer:head {names[index]}, {flat[index]}" for index in order],
        [names[index] for index in order],
        caption="Multidimensional scaling of Jensen-Shannon divergences: near heads attend to the same tokens.",
    )
    return figure, distances.tolist()


def _sentence_figures(
    sentence: Sentence | None,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[Sentence],
    limit: int | None,
) -> list[Figure]:
    if sentence is None:
        sentence = next((item for item in sentences if 6 <= len(split_words(item)) <= 12), sentences[0])
    words = split_words(sentence)
    window = align_words(tokenizer, [sentence], limit)[0]
    [attention] = attention_maps(model, tokenizer, [window.features])
    tokens = tokenizer.convert_ids_to_tokens(window.features["input_ids"])
    shares = word_attention(rollout(attention)[-1], window.token_words, len(words))
    caption = "Tokens of one sentence."
    if getattr(model.config, PRUNED_HEADS, None):
        caption += " Pruned heads are not counted."
    text = sentence if isinstance(sentence, str) else " ".join(sentence)
    return [
        AttentionView("sentence", f"Attention: {text}", tokens, attention.tolist(), caption=caption),
        Heatmap(
            "rollout",
            f"Rollout of attention: {text}",
            words,
            words,
            shares.tolist(),
            low=0.0,
            row_label="state of the last layer",
            column_label="input word",
            caption="Share of each input word in the last state of a word, if residual connections carry half of it "
            "(Abnar & Zuidema 2020); the rest comes from special tokens.",
        ),
    ]
