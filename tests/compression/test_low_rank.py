"""Low-rank factorization: optimality, modules, models of all architectures, and the command."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import command_output, save, tiny_pair
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification, PreTrainedModel
from zoo import REPRESENTATIVES, Case, as_subtests, assert_close, labeled_batch, make_batch, make_targets, tensors_of

from hf_ctxmodels import CtxError, prune_heads
from hf_ctxmodels.compression.int8.quantizer import CtxInt8Config, quantize_model
from hf_ctxmodels.compression.low_rank.compression import (
    LOW_RANK_MODULES,
    factorize_model,
    find_factorizable_modules,
    record_second_moments,
)
from hf_ctxmodels.compression.low_rank.factorization import factorize, max_rank
from hf_ctxmodels.compression.low_rank.modules import LowRankEmbedding, LowRankLinear, TiedLowRankLinear
from hf_ctxmodels.downstream.adapters import add_adapter, train_adapter
from hf_ctxmodels.inference.exporting import write_program
from hf_ctxmodels.layers.cpu.linear import linear
from hf_ctxmodels.layers.lm_loss.cross_entropy import DeferredLogits, summed_cross_entropy
from hf_ctxmodels.layers.lm_loss.kl_divergence import chunked_kl_divergence
from hf_ctxmodels.registry import FAMILIES

RANK = 3
BERT = Case(FAMILIES["bert"], "AutoModelForMaskedLM")
LABELED = [("good film", 1), ("bad film", 0), ("good plot and a good end", 1), ("bad plot", 0), ("a film", 2)] * 8


def truncated_svd(weight: Tensor, rank: int) -> Tensor:
    left, values, right = torch.linalg.svd(weight.double(), full_matrices=False)
    return (left[:, :rank] * values[:rank] @ right[:rank]).to(weight.dtype)


def test_unweighted_factors_equal_truncated_svd() -> None:
    torch.manual_seed(0)
    for shape in ((7, 12), (12, 7)):
        weight = torch.randn(shape)
        squares = torch.linalg.svdvals(weight.double()).square()
        for rank in range(1, 8):
            factors = factorize(weight, rank=rank)
            torch.testing.assert_close(factors.output @ factors.input, truncated_svd(weight, rank))
            assert factors.energy == pytest.approx(float(squares[:rank].sum() / squares.sum()))
            by_energy = factorize(weight, energy=factors.energy)
            assert by_energy.output.shape[1] == rank
        assert factorize(weight, energy=1.0).output.shape[1] == 7
    assert factorize(torch.zeros(4, 5), rank=2).energy == 1.0
    low_rank_weight = torch.randn(9, 2) @ torch.randn(2, 8)
    assert factorize(low_rank_weight, energy=1 - 1e-9).output.shape[1] == 2


@pytest.mark.parametrize("samples", [40, 5])  # with 5, the second moment of the 9 inputs has no inverse
def test_weighted_factors_minimize_output_error(samples: int) -> None:
    """Against the singular values of the outputs, unweighted factors, and optimization of the factors by LBFGS."""
    torch.manual_seed(samples)
    weight, inputs = torch.randn(6, 9), torch.randn(9, samples) * torch.logspace(-1, 1, 9)[:, None]
    moment = inputs.double() @ inputs.double().T
    values = torch.linalg.svdvals(weight.double() @ inputs.double())

    def error(output: Tensor, input: Tensor) -> Tensor:
        return ((weight - output @ input) @ inputs).square().sum()

    for rank in range(1, 6):
        factors, unweighted = factorize(weight, moment, rank=rank), factorize(weight, rank=rank)
        optimum = float(values[rank:].square().sum())
        assert float(error(*factors[:2])) == pytest.approx(optimum, rel=1e-4, abs=1e-3)
        assert float(error(*factors[:2])) <= float(error(*unweighted[:2])) * (1 + 1e-5)
        assert torch.allclose(factors.output.T @ factors.output, torch.eye(rank), atol=1e-5)
    output, input = torch.randn(6, 2, requires_grad=True), torch.randn(2, 9, requires_grad=True)
    optimizer = torch.optim.LBFGS([output, input], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = error(output, input)
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    descent_error = float(error(output, input).detach())
    assert descent_error == pytest.approx(float(error(*factorize(weight, moment, rank=2)[:2])), rel=1e-2)
    if samples == 5:  # the outputs determine 5 of 6 directions; compare the errors of the weight
        factors = factorize(weight, moment, rank=5)
        pinv_weight = truncated_svd(weight @ inputs, 5) @ torch.linalg.pinv(inputs)
        assert float((weight - factors.output @ factors.input).norm()) <= float((weight - pinv_weight).norm())


def test_counts_equal_diagonal_second_moment() -> None:
    torch.manual_seed(0)
    weight, counts = torch.randn(6, 20), torch.arange(20.0)
    by_counts, by_matrix = factorize(weight, counts, rank=2), factorize(weight, torch.diag(counts), rank=2)
    torch.testing.assert_close(by_counts.output @ by_counts.input, by_matrix.output @ by_matrix.input)
    repeated = weight.repeat_interleave(counts.long(), 1)
    basis = torch.linalg.svd(repeated)[0][:, :2]
    torch.testing.assert_close(by_counts.output @ by_counts.input, basis @ basis.T @ weight)


def test_max_rank_saves_parameters() -> None:
    for rows, columns in ((8, 8), (30, 7), (384, 1536)):
        rank = max_rank((rows, columns))
        assert rank * (rows + columns) < rows * columns <= (rank + 1) * (rows + columns)


@torch.no_grad()
def test_modules_equal_product_of_factors() -> None:
    torch.manual_seed(0)
    states, layer = torch.randn(2, 3, 10), LowRankLinear(10, 14, 4)
    expected = F.linear(states, layer.weight, layer.bias)
    torch.testing.assert_close(linear(layer, states), expected)
    torch.testing.assert_close(linear(layer, states, 3, 9), expected[..., 3:9])
    assert layer.is_rowwise
    assert LowRankLinear(10, 14, 4, bias=False).bias is None
    embeddings, ids = LowRankEmbedding(14, 10, 4, padding_idx=0, factor=3.0), torch.tensor([[0, 5], [13, 2]])
    torch.testing.assert_close(embeddings(ids), 3 * F.embedding(ids, embeddings.weight))
    assert embeddings(ids)[0, 0].count_nonzero() == 0
    tied = TiedLowRankLinear(10, 14, 4)
    tied.projection_weight, tied.output_factor.weight = embeddings.projection.weight, embeddings.table.weight
    expected = F.linear(states, embeddings.weight, tied.bias)
    torch.testing.assert_close(linear(tied, states), expected)
    torch.testing.assert_close(linear(tied, states, 3, 9), expected[..., 3:9])


def test_losses_are_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cross-entropy and the KL divergence of a low-rank output layer are the same as from all logits; only chunks
    of logits are in memory."""
    torch.manual_seed(0)
    states, targets = torch.randn(40, 10, requires_grad=True), torch.randint(0, 14, (40,))
    layers = LowRankLinear(10, 14, 4), TiedLowRankLinear(10, 14, 4)
    nn.init.normal_(layers[1].projection_weight)
    for layer in layers:
        monkeypatch.setattr(layer, "forward", None)  # would compute all logits
        weights = [states, *layer.parameters()]
        logits = F.linear(states, layer.weight, layer.bias)
        teacher = nn.Linear(10, 14)
        losses = {
            summed_cross_entropy(layer, states, targets): F.cross_entropy(logits, targets, reduction="sum"),
            chunked_kl_divergence(DeferredLogits(states, layer), DeferredLogits(states.detach(), teacher), 2.0): 4
            * F.kl_div((logits / 2).log_softmax(-1), (teacher(states) / 2).softmax(-1).detach(), reduction="sum"),
        }
        for loss, expected in losses.items():
            assert_close(loss, expected, tolerance=1e-4)
            gradients = (torch.autograd.grad(value, weights, retain_graph=True) for value in (loss, expected))
            assert_close(*gradients, tolerance=1e-4)


@pytest.mark.fast_families("bert", "t5", "elmo")
@as_subtests(REPRESENTATIVES)
def test_models_equal_models_with_truncated_weights(case: Case, tmp_path: Path) -> None:
    """Outputs, loss and gradients are the same as with the original layers and truncated weights; the reopened model is
    the same, also as an encoder, and all its factors are trained."""
    dense, batch = case.model(), make_batch(case)
    names = find_factorizable_modules(dense, (), ())
    modules: dict[str, Any] = dict(dense.named_modules())
    submodels = [module for module in dense.modules() if isinstance(module, PreTrainedModel)]
    if len({id(submodel.config) for submodel in submodels}) > 1 or not names:
        with pytest.raises(CtxError, match=r"several models|No layer"):
            factorize_model(dense, rank=RANK)
        return
    model = copy.deepcopy(dense)
    results = factorize_model(model, rank=RANK)
    assert [result.name for result in results] == names
    with torch.no_grad():
        for result in results:
            if result.rank is not None:
                weight = modules[result.name].weight
                weight.copy_(truncated_svd(weight, result.rank))
    targets = batch | make_targets(case, batch)
    assert_close(tensors_of(model(**batch)), tensors_of(dense(**batch)))
    losses = [variant(**targets).loss for variant in (model, dense)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-4)
    for loss in losses:
        loss.backward()
    gradients = dict(dense.named_parameters())
    for name, parameter in model.named_parameters():
        if name in gradients and gradients[name].grad is not None and gradients[name].shape == parameter.shape:
            torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-3, atol=1e-4)
    factor = model.get_submodule(results[0].name)
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in factor.parameters())

    model.save_pretrained(tmp_path / str(case))
    reopened, report = type(model).from_pretrained(tmp_path / str(case), output_loading_info=True)
    assert not any(report.values()), report
    for name, value in tensors_of(reopened(**batch)).items():
        assert torch.equal(value, tensors_of(model(**batch))[name]), name
    assert reopened.num_parameters() == model.num_parameters() < dense.num_parameters()
    encoder = AutoModel.from_pretrained(tmp_path / str(case))
    prefix, low_rank = model.base_model_prefix, (LowRankLinear, LowRankEmbedding)
    assert sum(isinstance(module, low_rank) for module in encoder.modules()) == sum(
        isinstance(module, low_rank) for module in getattr(model, prefix).modules()
    )


def test_tied_output_layer_shares_factors(tmp_path: Path) -> None:
    """An encoder checkpoint loads with a tied output layer; `tie_weights` keeps the factors tied."""
    encoder = Case(FAMILIES["bert"], "AutoModel").model()
    factorize_model(encoder, rank=RANK)
    encoder.save_pretrained(tmp_path)
    model = AutoModelForMaskedLM.from_pretrained(tmp_path)
    decoder, embeddings = model.mlm_head.decoder, model.bert.embeddings.word_embeddings
    assert decoder.output_factor.weight is embeddings.table.weight
    assert decoder.projection_weight is embeddings.projection.weight
    assert type(model.mlm_head.dense) is nn.Linear
    model.tie_weights()
    assert decoder.projection_weight is embeddings.projection.weight
    with pytest.raises(CtxError, match="Low-rank embeddings cannot be resized"):
        model.resize_token_embeddings(70)


def test_adapters_of_compressed_models() -> None:
    """Bottleneck adapters are trained with frozen factors; PEFT adapts and merges a factor."""
    case = Case(FAMILIES["bert"], "AutoModelForSequenceClassification")
    model, batch = case.model(), labeled_batch(case)
    factorize_model(model, rank=RANK)
    base = copy.deepcopy(model)
    add_adapter(model, "a")
    train_adapter(model, "a")
    model(**batch).loss.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert any(".adapters." in name for name in trained)
    assert not any("factor" in name and "bert.layers" in name for name in trained)

    peft = pytest.importorskip("peft", reason="needs the extra `ecosystem`")
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="SEQ_CLS", target_modules=["output_factor"])).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    expected = adapted(**batch).logits
    assert_close(adapted.merge_and_unload()(**batch).logits, expected, tolerance=1e-4)


def test_layer_selection_and_errors(tmp_path: Path) -> None:
    model = BERT.model()
    results = factorize_model(model, energy=0.3, layers=["feed_forward", "position_embeddings"], skip=["layers.1"])
    assert {result.name for result in results} == {
        *(f"bert.layers.{layer}.feed_forward.{name}_proj" for layer in (0, 2) for name in ("up", "down")),
        "bert.embeddings.position_embeddings",
    }
    assert all(result.rank is not None and 0.3 <= result.energy < 1 for result in results)
    assert getattr(model.config, LOW_RANK_MODULES) == {result.name: result.rank for result in results}
    for options, message in (
        ({"rank": 2}, "already low-rank"),
        ({"rank": 2, "energy": 0.5}, "exactly one"),
        ({"energy": 0.0}, "exactly one"),
    ):
        with pytest.raises(CtxError, match=message):
            factorize_model(model if "energy" not in options else BERT.model(), **options)  # type: ignore[arg-type]
    with pytest.raises(CtxError, match="no layout for low rank modules"):
        model.export_reference(tmp_path)
    model = BERT.model()
    factorize_model(model, rank=2)
    with pytest.raises(CtxError, match="not a plain linear layer"):
        prune_heads(model, {0: [1]})
    with pytest.raises(CtxError, match=r"No layer .* above rank"):
        factorize_model(BERT.model(), rank=1000)
    with pytest.raises(CtxError, match="no module 'feed'"):
        factorize_model(BERT.model(), rank=2, layers=["feed"])
    model = BERT.model()
    add_adapter(model, "a")
    with pytest.raises(CtxError, match="has adapters"):
        factorize_model(model, rank=2)
    model = BERT.model()
    quantize_model(model, CtxInt8Config())
    with pytest.raises(CtxError, match="is quantized"):
        factorize_model(model, rank=2)


def test_pruned_and_quantized_models(tmp_path: Path) -> None:
    """A pruned model can be factorized, and the factors can be quantized; both are reopened."""
    model, batch = BERT.model(), make_batch(BERT)
    prune_heads(model, {0: [1], 2: [0, 3]})
    factorize_model(model, rank=8)
    expected = model(**batch).logits
    model.save_pretrained(tmp_path / "pruned")
    reopened = AutoModelForMaskedLM.from_pretrained(tmp_path / "pruned").eval()
    assert torch.equal(reopened(**batch).logits, expected)
    quantize_model(reopened, CtxInt8Config())
    with torch.no_grad():
        outputs = reopened(**batch).logits
        assert F.cosine_similarity(outputs.flatten(), expected.flatten(), 0) > 0.98
        reopened.save_pretrained(tmp_path / "int8")
        reloaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "int8")
        assert torch.equal(reloaded(**batch).logits, outputs)


@pytest.mark.slow
def test_exported_models(tmp_path: Path) -> None:
    model, batch = BERT.model(), make_batch(BERT)
    factorize_model(model, rank=8)
    (logits,) = write_program(model, batch, tmp_path / "program.pt2")(batch)
    is_token = batch["attention_mask"].bool()
    assert_close(logits[is_token], model(**batch).logits[is_token], tolerance=1e-4)


@torch.no_grad()
def test_recorded_second_moments() -> None:
    """Second moments are sums over the inputs of a layer, counts exclude padding; layers without inputs are kept."""
    model, batch = BERT.model(), make_batch(BERT)
    names, layer_inputs = find_factorizable_modules(model, (), ()), list[Tensor]()
    layer = model.bert.layers[1].feed_forward.down_proj
    handle = layer.register_forward_pre_hook(lambda module, arguments: layer_inputs.append(arguments[0].double()))
    with record_second_moments(model, names) as moments:
        for _ in range(2):
            model(**batch)
    handle.remove()
    rows = torch.cat([states.flatten(0, -2) for states in layer_inputs])
    torch.testing.assert_close(moments["bert.layers.1.feed_forward.down_proj"], rows.T @ rows, rtol=1e-4, atol=1e-3)
    counts = moments["bert.embeddings.word_embeddings"]
    assert counts.sum() == 2 * batch["attention_mask"].sum()
    assert counts[0] == 0
    weight, plain = layer.weight.clone(), factorize(layer.weight, rank=RANK)
    del moments["bert.layers.0.attention.qkv_proj"]
    results = factorize_model(model, rank=RANK, moments=moments)
    assert [result.name for result in results if result.reason == "not used by the texts"] == [
        "bert.layers.0.attention.qkv_proj"
    ]
    weighted = model.bert.layers[1].feed_forward.down_proj.weight
    error, plain_error = (
        float(((weight - product).double() @ rows.T).norm()) for product in (weighted, plain.output @ plain.input)
    )
    assert error < plain_error


def test_export_low_rank_command_and_distillation(tmp_path: Path) -> None:
    """Options and errors of the command; `distill` trains the low-rank model, which keeps its factors."""
    texts = [text for text, _ in LABELED]
    model, tokenizer = tiny_pair("bert", "AutoModelForSequenceClassification", texts)  # three labels
    original, output = save(tmp_path / "original", model, tokenizer), tmp_path / "low-rank"
    texts_file = tmp_path / "texts.txt"
    texts_file.write_text("\n".join(texts), encoding="utf-8")
    flags = {"model": original, "output_dir": output}
    assert "exactly one" in command_output("export low-rank", **flags, fails=True)
    assert "energy=1.5" in command_output("export low-rank", **flags, energy=1.5, fails=True)
    missing = f"activations:file={tmp_path / 'missing.txt'}"
    assert "missing.txt" in command_output("export low-rank", **flags, rank=4, weighting=missing, fails=True)
    stdout = command_output("export low-rank", **flags, rank=4, weighting=f"activations:file={texts_file}")
    assert "times fewer" in stdout
    assert "qkv_proj 96 x 32 (3 layers)" in stdout
    assert json.loads((output / "config.json").read_text())[LOW_RANK_MODULES]["bert.layers.0.attention.out_proj"] == 4
    assert "already holds" in command_output("export low-rank", **flags, rank=4, fails=True)
    repeated_flags = {"model": output, "output_dir": tmp_path / "twice", "rank": 2}
    assert "already low-rank" in command_output("export low-rank", **repeated_flags, fails=True)

    model.export_reference(tmp_path / "reference")  # a BertForSequenceClassification
    tokenizer.save_pretrained(tmp_path / "reference")
    command_output("export low-rank", model=tmp_path / "reference", output_dir=tmp_path / "from-reference", rank=4)
    factorized = AutoModelForSequenceClassification.from_pretrained(tmp_path / "from-reference")
    command_output("export low-rank", model=original, output_dir=tmp_path / "plain", rank=4)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain")
    assert_close(factorized.state_dict(), plain.state_dict(), "weights", tolerance=0)

    table, student = tmp_path / "train.tsv", tmp_path / "student"
    table.write_text("text\tlabel\n" + "\n".join(f"{text}\t{label}" for text, label in LABELED), encoding="utf-8")
    command_output(
        "distill sequence-classification",
        *("--teacher", original, "--model", output, "--output_dir", student, "--losses", "soft-targets"),
        *("--train_file", table, "--validation_file", table, "--num_train_epochs", 1, "--per_device_batch_size", 16),
        *("--max_length", 16),
    )
    trained = AutoModelForSequenceClassification.from_pretrained(student)
    initial = AutoModelForSequenceClassification.from_pretrained(output)
    layers = [checkpoint.bert.layers[0].attention.out_proj for checkpoint in (trained, initial)]
    assert isinstance(layers[0], LowRankLinear)
    assert not torch.equal(layers[0].weight, layers[1].weight)
