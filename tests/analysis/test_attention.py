"""Attention maps, head patterns, dependency heads and head importance."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers
from commands import run_command, save_summary
from scipy.spatial.distance import jensenshannon
from scipy.stats import entropy
from torch import Tensor
from torch.testing import assert_close
from zoo import BASES, HEADS, Case, as_subtests, labeled_batch, make_batch

from hf_ctxmodels import CtxBertConfig, CtxBertForSequenceClassification, CtxError
from hf_ctxmodels.analysis.attention import dependencies
from hf_ctxmodels.analysis.attention.dependencies import ALL, score_dependencies
from hf_ctxmodels.analysis.attention.importance import head_importance, removal_curve, single_head_scores
from hf_ctxmodels.analysis.attention.maps import attention_maps, rollout, word_attention
from hf_ctxmodels.analysis.attention.patterns import (
    MEASURES,
    AttentionInput,
    HeadProfile,
    embed_heads_2d,
    head_distances,
    make_inputs,
    measure,
    profile_heads,
)
from hf_ctxmodels.analysis.results import AnalysisResult
from hf_ctxmodels.cli import analyze_heads
from hf_ctxmodels.core.attention_heads import attention_layers, prune_heads
from hf_ctxmodels.core.config import CtxTransformerConfig
from hf_ctxmodels.data.treebanks import read_treebank
from hf_ctxmodels.layers.attention.head_gates import install_gates

TRANSFORMERS = [case for case in BASES if issubclass(case.family.config, CtxTransformerConfig)]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16}


class Padder:
    """Stub of a tokenizer that pads on the left."""

    def pad(self, features: list[dict[str, Any]], **options: Any) -> dict[str, Tensor]:
        length = max(len(feature["input_ids"]) for feature in features)
        padded_ids = [[0] * (length - len(feature["input_ids"])) + feature["input_ids"] for feature in features]
        masks = [[0] * (length - len(feature["input_ids"])) + [1] * len(feature["input_ids"]) for feature in features]
        return {"input_ids": torch.tensor(padded_ids), "attention_mask": torch.tensor(masks)}


@as_subtests(TRANSFORMERS)
def test_attention_maps_do_not_depend_on_batch(case: Case) -> None:
    """Padding is removed; encoder-decoder models return the maps of the encoder."""
    model: Any = case.model()
    features = [{"input_ids": [1, *range(7, 7 + length)]} for length in (3, 9, 5)]
    maps = list(attention_maps(model, Padder(), features))  # type: ignore[arg-type]
    for feature, attention in zip(features, maps, strict=True):
        length = len(feature["input_ids"])
        assert attention.shape == (3, 4, length, length)
        assert_close(attention.sum(-1), torch.ones(3, 4, length))
        [single] = attention_maps(model, Padder(), [feature])  # type: ignore[arg-type]
        if not case.has_position_limit:  # learned positions count columns, unless position_ids are given
            assert_close(attention, single, atol=1e-5, rtol=1e-4)


def test_model_without_attention_raises() -> None:
    glove = next(case for case in BASES if case.family.name == "glove").model()
    with pytest.raises(CtxError, match="no attention"):
        next(attention_maps(glove, Padder(), [{"input_ids": [1, 7, 8]}]))  # type: ignore[arg-type]


def test_word_attention_and_rollout() -> None:
    attention = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], [0.0, 0.5, 0.5, 0.0], [1.0, 0.0, 0.0, 0.0]])
    word_map = word_attention(attention[None], [-1, 0, 0, 2], 3)[0]  # the second word has no tokens
    assert_close(word_map, torch.tensor([[0.75, 0.0, 0.05], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    maps = torch.rand(3, 2, 4, 4)
    expected = np.eye(4)
    for layer, result in zip(maps.double().numpy(), rollout(maps), strict=True):
        mixed = (layer[0] + layer[1]) / 2 + np.eye(4)
        expected = (mixed / mixed.sum(1, keepdims=True)) @ expected
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5)


def constructed_maps() -> tuple[AttentionInput, dict[str, Tensor]]:
    """A text pair (10 and 7 tokens, 3 special tokens) and an attention map of each pattern."""
    segments = torch.tensor([-1, *[0] * 10, -1, *[1] * 7, -1])
    special = segments < 0
    inputs = AttentionInput({}, special, special & (torch.arange(20) > 0), torch.zeros(20, dtype=torch.bool), segments)
    uniform = torch.full((20, 20), 1 / 20)
    vertical = torch.zeros(20, 20)
    vertical[:, special] = 1 / 3
    diagonal = torch.eye(20).roll(1, 0)  # the previous token
    block = (segments[:, None] == segments).float()
    return inputs, {
        "vertical": 0.9 * vertical + 0.1 * uniform,
        "diagonal": 0.7 * diagonal + 0.3 * uniform,
        "vertical + diagonal": 0.45 * vertical + 0.45 * diagonal + 0.1 * uniform,
        "block": 0.8 * block / block.sum(-1, keepdim=True) + 0.2 * uniform,
        "heterogeneous": uniform,
    }


def test_constructed_maps_are_classified() -> None:
    inputs, maps = constructed_maps()
    measures = measure(torch.stack([*maps.values()])[:, None], inputs)  # five layers of one head
    names = ("attention_to_special_tokens", "attention_to_neighbors", "within_segment_excess")
    profile = HeadProfile({}, *(measures[name] for name in names))
    assert [row[0] for row in profile.classify()] == [*maps]
    values = {name: dict(zip(maps, column[:, 0].tolist(), strict=True)) for name, column in measures.items()}
    assert values["self"]["heterogeneous"] == pytest.approx(0.05)
    assert values["previous"]["diagonal"] == pytest.approx(0.7 + 0.3 / 20)
    assert values["next"]["diagonal"] == pytest.approx(0.3 / 20)
    assert values["first"]["vertical"] == pytest.approx(0.9 / 3 + 0.1 / 20)
    assert values["separator"]["vertical"] == pytest.approx(0.9 * 2 / 3 + 0.1 / 10)
    assert values["entropy"]["heterogeneous"] == pytest.approx(np.log(20), abs=1e-4)
    assert values["within_segment_excess"]["heterogeneous"] == pytest.approx(0, abs=1e-6)


def test_measures_of_random_maps_equal_sums_over_tokens() -> None:
    """Causal maps of a text pair: uniform attention is uniform over the tokens that a row may attend to."""
    segments = [-1, 0, 0, 0, -1, 1, 1, -1]
    count = len(segments)
    is_special = torch.tensor(segments) < 0
    separators, punctuation = torch.zeros(2, count, dtype=torch.bool)
    separators[[4, 7]] = punctuation[3] = True
    maps = torch.rand(2, 2, count, count, generator=torch.Generator().manual_seed(0)).tril()
    maps /= maps.sum(-1, keepdim=True)
    inputs = AttentionInput({}, is_special, separators, punctuation, torch.tensor(segments))
    measures = measure(maps, inputs)
    texts = [token for token in range(count) if segments[token] >= 0]
    for layer, head in np.ndindex(2, 2):
        weights = maps[layer, head].double().numpy()
        excess = []
        for row in texts:
            visible = [column for column in texts if column <= row]
            same = [column for column in visible if segments[column] == segments[row]]
            excess.append(weights[row, same].sum() - len(same) / len(visible) * weights[row, visible].sum())
        neighbors = [
            (row, column) for row, column in np.ndindex(count, count) if abs(row - column) <= 1 and column in texts
        ]
        expected = {
            "self": np.mean([weights[token, token] for token in range(count)]),
            "previous": np.mean([weights[token, token - 1] for token in range(1, count)]),
            "next": 0,
            "first": weights[:, 0].mean(),
            "separator": weights[:, [4, 7]].sum() / count,
            "punctuation": weights[:, 3].mean(),
            "entropy": np.mean([entropy(0.9999 * row + 0.0001 / count) for row in weights]),
            "attention_to_special_tokens": weights[:, [0, 4, 7]].sum() / count,
            "attention_to_neighbors": sum(weights[pair] for pair in neighbors) / count,
            "within_segment_excess": np.mean(excess),
        }
        assert {name: float(values[layer, head]) for name, values in measures.items()} == pytest.approx(
            expected, abs=1e-5
        )
    inputs.segments[5:7] = 0  # a single text
    assert not measure(maps, inputs)["within_segment_excess"].any()


@pytest.fixture(scope="module")
def folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny classifier with its tokenizer, a treebank, and labeled texts."""
    folder = tmp_path_factory.mktemp("heads")
    torch.manual_seed(0)
    labels = {"id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}
    config = CtxBertConfig(vocab_size=len(tokenizer), initializer_range=0.4, **SIZES, **labels)
    model = CtxBertForSequenceClassification(config)
    model.save_pretrained(folder / "bert")
    tokenizer.save_pretrained(folder / "bert")
    rows = ["The\tDET\t2\tdet", "cat\tNOUN\t3\tnsubj", "saw\tVERB\t0\troot", "seven\tNUM\t5\tnummod",
            "letters\tNOUN\t3\tobj", ".\tPUNCT\t3\tpunct"]  # fmt: skip
    cells = [row.split("\t") for row in rows]
    lines = [f"{i}\t{w}\t_\t{t}\t_\t_\t{h}\t{r}\t_\t_" for i, (w, t, h, r) in enumerate(cells, 1)]
    (folder / "bank.conllu").write_text(("\n".join(lines) + "\n\n") * 12)
    texts = [f"The {'cat' if i % 2 else 'dog'} saw the red boat.\t{'yes' if i % 3 else 'no'}" for i in range(12)]
    (folder / "dev.tsv").write_text("\n".join(["text\tlabel", *texts]) + "\n")
    return folder


def test_head_profiles_and_distances(folder: Path, tokenizer: Any) -> None:
    """Profiles locate punctuation and separators and match transformers; distances are Jensen-Shannon divergences."""
    inputs = make_inputs(tokenizer, ["The cat saw the red boat. The bridge.", "A dog painted this story."] * 2, 64)
    assert len(inputs) == 2
    tokens = tokenizer.convert_ids_to_tokens(inputs[0].features["input_ids"])
    assert [token for token, flag in zip(tokens, inputs[0].punctuation, strict=True) if flag] == [".", ".", "."]
    assert [token for token, flag in zip(tokens, inputs[0].separators, strict=True) if flag] == ["[SEP]"] * 2
    ctx_model: Any = transformers.AutoModel.from_pretrained(folder / "bert").eval()
    ctx_model.export_reference(folder / "reference")
    reference = transformers.BertModel.from_pretrained(folder / "reference").eval()
    profiles = [profile_heads(model, tokenizer, inputs) for model in (ctx_model, reference)]
    assert reference.config._attn_implementation == "sdpa"
    for name in MEASURES:
        assert_close(profiles[0].measures[name], profiles[1].measures[name], atol=1e-5, rtol=1e-4)
    distances = head_distances(ctx_model, tokenizer, inputs[:1])
    [attention] = attention_maps(ctx_model, tokenizer, [inputs[0].features])
    smoothed = 0.999 * attention.double() + 0.001 / attention.shape[-1]
    expected = jensenshannon(smoothed[0, 1].numpy(), smoothed[1, 2].numpy(), axis=1) ** 2
    assert distances[1, 6] == pytest.approx(expected.mean(), rel=1e-3)
    assert embed_heads_2d(distances).shape == (8, 2)
    with pytest.raises(CtxError, match="16 to 20 tokens"):
        make_inputs(tokenizer, ["A dog."], 20)


def test_dependency_accuracy_of_heads(folder: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that attends to the syntactic head has accuracy 1; offset baselines are computed from the data."""
    sentences = read_treebank(folder / "bank.conllu")

    def maps(model: Any, tokenizer: Any, inputs: Any) -> Iterator[Tensor]:
        windows = dependencies.align_words(tokenizer, [sentences[0].words])
        words = windows[0].token_words
        for _ in inputs:
            to_head, to_first_word = torch.full((2, len(words), len(words)), 0.01)
            for row, word in enumerate(words):
                for column, target_word in enumerate(words):
                    if word >= 0 and sentences[0].heads[word] == target_word >= 0:
                        to_head[row, column] = 0.5
            to_first_word[:, 1] = 0.9
            yield torch.stack([torch.stack([to_first_word, to_first_word.T]), torch.stack([to_first_word, to_head])])

    monkeypatch.setattr(dependencies, "attention_maps", maps)
    scores = score_dependencies(None, tokenizer, sentences)  # type: ignore[arg-type]
    rows = {row.relation: row for row in scores.best_heads(min_arcs=6)}
    assert rows.keys() == {ALL, "det", "nsubj", "nummod", "obj"}
    assert scores.counts(ALL) == [24, 24]
    best = rows[ALL]
    assert (best.layer, best.head, best.direction, best.accuracy) == (1, 1, "to head", 1.0)
    assert (rows["det"].offset, rows["det"].offset_accuracy, rows["obj"].offset) == (1, 1.0, -2)
    assert best.offset_accuracy == 0.75  # three of four heads are the next word
    assert scores.accuracies("det")[0, 0] == 0


@pytest.mark.parametrize("family", ["bert", "xlnet", "t5", "gpt2"])
def test_importance_by_finite_differences(family: str) -> None:
    """Importance equals the finite-difference gradient of the loss with respect to a gate."""
    case = next(case for case in HEADS if case.family.name == family and len(case.targets) == 1)
    model, batch = case.model(), labeled_batch(case)
    requires_grad = [parameter.requires_grad for parameter in model.parameters()]
    importance = head_importance(model, [batch], normalize=False)
    assert [parameter.requires_grad for parameter in model.parameters()] == requires_grad
    assert importance.keys() == attention_layers(model).keys()
    for name in importance:
        differences = []
        for epsilon in (0.01, -0.01):
            gate = torch.ones(4)
            gate[2] += epsilon
            with install_gates(model, {name: gate}), torch.no_grad():
                differences.append(float(model(**batch).loss))
        expected = abs(differences[0] - differences[1]) / 0.02
        assert float(importance[name][2]) == pytest.approx(expected, rel=0.01, abs=1e-4)


@as_subtests([case for case in HEADS if issubclass(case.family.config, CtxTransformerConfig) and case.targets])
def test_importance_of_all_head_classes(case: Case) -> None:
    importance = head_importance(case.model(), [labeled_batch(case)])
    values = torch.cat([*importance.values()])
    assert values.isfinite().all(), case
    assert values.any(), case


def test_normalized_importance_is_mean_over_batches() -> None:
    case = next(case for case in HEADS if case.family.name == "bert" and len(case.targets) == 1)
    model, batch = case.model(), labeled_batch(case)
    examples = [{name: value[:1] for name, value in batch.items()}, {name: value[1:2] for name, value in batch.items()}]
    unnormalized = [head_importance(model, [example], normalize=False) for example in examples]
    expected = {name: (unnormalized[0][name] + unnormalized[1][name]) / 2 for name in unnormalized[0]}
    for name, values in head_importance(model, examples).items():
        assert_close(values, expected[name] / expected[name].norm())
    with pytest.raises(CtxError, match="returns no loss"):
        head_importance(model, [make_batch(case)])
    with pytest.raises(CtxError, match="at least one example"):
        head_importance(model, [])


def test_removal_curve_and_single_heads() -> None:
    """The least important heads are removed first, importance is recomputed, and given steps are not repeated."""
    model = next(case for case in BASES if case.family.name == "bert").model()
    values = {name: torch.arange(4.0) + 4 * int(name) for name in ("0", "1", "2")}
    calls = []

    def importance() -> Any:
        calls.append(len(calls))
        return values if len(calls) < 3 else {name: -value for name, value in values.items()}

    steps = list(removal_curve(model, lambda: 1.0, importance, fraction=0.25))
    assert [step.num_removed for step in steps] == [0, 3, 6, 9, 12]
    assert steps[1].removed == {"0": [0, 1, 2]}
    assert steps[2].removed == {"0": [0, 1, 2, 3], "1": [0, 1]}
    assert steps[3].removed["2"] == [1, 2, 3]
    resumed_steps = list(removal_curve(model, lambda: 1.0, lambda: values, fraction=0.25, steps=steps[:3]))
    assert [step.num_removed for step in resumed_steps] == [9, 12]
    inputs = {"input_ids": torch.tensor([[1, 7, 8, 9]])}

    def score() -> float:
        with torch.no_grad():
            return float(model(**inputs).last_hidden_state[0, 0, 0])

    scores = dict(single_head_scores(model, score, scores={"0": [1.0]}))
    assert scores["0"] == [1.0]
    assert len(scores["1"]) == 5
    assert len(set(scores["1"])) == 5


def test_attention_and_heads_commands(
    folder: Path, tokenizer: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both commands write tables and figures and resume from partial results."""
    output = tmp_path / "out"
    flags: list[object] = ["--model", folder / "bert", "--output_dir", output]
    attention: list[object] = ["analyze", "attention", *flags, "--text", folder / "bank.conllu", "--min_arcs", 6]
    assert run_command(*attention) == 0, capsys.readouterr().err
    result = AnalysisResult.load(output / "attention.json")
    assert {table.title for table in result.tables} >= {"Patterns of the heads", "Best head of each relation"}
    figures = {figure.name: figure for figure in result.figures}
    assert {"patterns", "rollout", "sentence", "distances"} <= figures.keys()
    assert (figures["dependencies"].low, figures["dependencies"].high) == (0, 1)
    assert run_command(*attention) == 2
    assert "--overwrite" in capsys.readouterr().err
    heads: list[object] = ["analyze", "heads", *flags, "--validation_file", folder / "dev.tsv", "--curve_step", 0.25]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise CtxError("interrupted")

    with monkeypatch.context() as patch:
        patch.setattr(analyze_heads, "removal_curve", interrupted)
        assert run_command(*heads) == 2
    assert run_command(*heads) == 0, capsys.readouterr().err
    assert "Partial results are read" in capsys.readouterr().err
    result = AnalysisResult.load(output / "heads.json")
    assert len(result.values["single_heads"]["0"]) == 5
    assert [step["num_removed"] for step in result.values["curve"]] == [0, 2, 4, 6, 8]
    assert not list(output.glob("*partial*"))
    pruned = CtxBertForSequenceClassification.from_pretrained(folder / "bert")
    prune_heads(pruned, {0: [0, 3], 1: [1, 2]})
    pruned.save_pretrained(tmp_path / "pruned")
    tokenizer.save_pretrained(tmp_path / "pruned")
    flags = ["--model", tmp_path / "pruned", "--output_dir", output, "--overwrite"]
    assert run_command("analyze", "attention", *flags, "--text", folder / "bank.conllu", "--min_arcs", 6) == 0
    assert run_command("analyze", "heads", *flags, "--validation_file", folder / "dev.tsv", "--curve_step", 0) == 0
    figures = {figure.name: figure for name in ("attention", "heads")
               for figure in AnalysisResult.load(output / f"{name}.json").figures}  # fmt: skip
    for name in ("self", "importance", "single-heads"):
        assert [[value is None for value in row] for row in figures[name].values] == [
            [True, False, False, True],
            [False, True, True, False],
        ]
    assert {text.partition(",")[0] for text in figures["distances"].texts} == {
        f"layer:head {head}" for head in ("0:1", "0:2", "1:0", "1:3")
    }
    text: list[object] = ["--text", folder / "none.txt"]
    assert run_command("analyze", "attention", *flags, *text, "--overwrite") == 2


@pytest.mark.parametrize(("flags", "expected"), [({}, 6), ({"max_length": 4}, 4)])
def test_heads_command_reads_as_in_finetuning(
    flags: dict[str, int], expected: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default to the maximum length of fine-tuning, which also determines the columns."""
    shutil.copytree(folder / "bert", tmp_path / "bert")
    columns = {"text_columns": "review", "label_column": "polarity"}
    save_summary(tmp_path / "bert", "sequence-classification", max_length=6, columns=columns)
    _, *lines = (folder / "dev.tsv").read_text().splitlines()
    (tmp_path / "dev.tsv").write_text("\n".join(["review\tpolarity", *lines]))
    analyze = Mock(side_effect=CtxError("stop"))
    monkeypatch.setattr(analyze_heads, "analyze", analyze)
    paths = {"model": tmp_path / "bert", "validation_file": tmp_path / "dev.tsv", "output_dir": tmp_path / "out"}
    assert run_command("analyze", "heads", **paths, **flags) == 2
    features = analyze.call_args.args[1].encoded.features
    assert {len(feature["input_ids"]) for feature in features} == {expected}
