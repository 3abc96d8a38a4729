"""Outputs, losses and gradients equal transformers' for random small configurations in float32."""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from zoo import (
    REFERENCE_CASES,
    REPRESENTATIVES,
    Batch,
    Case,
    as_subtests,
    assert_close,
    assert_same_outputs,
    load_strict,
    make_batch,
    make_targets,
    tensors_of,
)

pytestmark = pytest.mark.all_families

SEEDS = range(6)
FAST_SEEDS = SEEDS[:2]
BASES = [case for case in REFERENCE_CASES if case.is_base]
HEADS = [case for case in REFERENCE_CASES if not case.is_base]


def random_fields(seed: int) -> dict[str, Any]:
    """Fields of a random small configuration; the vocabulary has the size of the batches."""
    rng = np.random.default_rng(seed)
    heads = int(rng.choice([1, 2, 3, 4, 6]))
    fields = {
        "hidden_size": heads * int(rng.choice([4, 8, 12])),
        "num_attention_heads": heads,
        "num_hidden_layers": int(rng.integers(1, 5)),
        "intermediate_size": int(rng.integers(5, 90)),
        "hidden_act": str(rng.choice(("gelu", "relu", "gelu_new", "silu", "tanh"))),
        "layer_norm_eps": float(rng.choice([1e-12, 1e-5, 1e-3])),
        "max_position_embeddings": int(rng.integers(20, 50)),
        "initializer_range": float(rng.choice([0.02, 0.1, 0.2])),
    }
    layers = fields["num_hidden_layers"]
    return fields | {
        "embedding_size": int(rng.choice([8, 20, fields["hidden_size"]])),
        "num_hidden_groups": int(rng.choice([groups for groups in range(1, layers + 1) if layers % groups == 0])),
        "inner_group_num": int(rng.integers(1, 3)),
    }


def random_batch(case: Case, seed: int, *, side: str | None = None, masked: bool = True) -> Batch:
    """Examples of random lengths, with two segments for even seeds."""
    lengths = [int(length) for length in np.random.default_rng(seed + 100).integers(1, 18, size=5)]
    batch = make_batch(case, lengths, side=side, seed=seed, masked=masked)
    if seed % 2:
        batch.pop("token_type_ids", None)
    return batch


def pair(case: Case, seed: int, folder: Any, **fields: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A random transformers model, and the model loaded from its checkpoint without missing or unexpected keys."""
    reference = case.reference_model(seed, **case.reference_fields(random_fields(seed)), **fields)
    reference.save_pretrained(folder)
    return reference, load_strict(case.model_class, folder)


def assert_equal_outputs(case: Case, seed: int, reference: PreTrainedModel, model: PreTrainedModel) -> None:
    """With and without a mask, and with padding on the other side."""
    for masked in (True, False):
        batch = random_batch(case, seed, masked=masked)
        label = f"of seed {seed}, masked: {masked}"
        assert_same_outputs(model(**batch), reference(**batch), batch.get("attention_mask"), where=label)
    batch = random_batch(case, seed, side="left" if case.padding_side == "right" else "right")
    accepts_positions = "position_ids" in inspect.signature(reference.forward).parameters
    if case.has_choices or ("position_ids" in batch and not accepts_positions):  # transformers counts columns
        return
    outputs, expected = tensors_of(model(**batch)), tensors_of(reference(**batch))
    token_mask = batch["attention_mask"] == 1
    names = ["last_hidden_state"] if case.is_base else expected  # the pooler of transformers reads a padding column
    for name in names:
        if expected[name].shape[:2] == batch["input_ids"].shape[:2]:
            label = f"{name} of seed {seed}, padded on the other side"
            assert_close(outputs[name][token_mask], expected[name][token_mask], label)


def assert_equal_gradients(model: PreTrainedModel, reference: PreTrainedModel, folder: Path) -> None:
    """The gradients of the model are exported to the layout of transformers for the comparison."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(_gradient(parameter))
    model.export_reference(folder)
    exported = type(reference).from_pretrained(folder)
    for (name, gradient), parameter in zip(exported.named_parameters(), reference.parameters(), strict=True):
        # additional segment embeddings are exported as well
        assert_close(gradient[: len(parameter)], _gradient(parameter), f"gradient of {name}")


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


@pytest.mark.parametrize(
    "seeds", [FAST_SEEDS, pytest.param(SEEDS[len(FAST_SEEDS) :], marks=pytest.mark.slow)], ids=["fast", "others"]
)
@pytest.mark.parametrize("case", BASES, ids=str)
def test_base_model_outputs(case: Case, seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        assert_equal_outputs(case, seed, *pair(case, seed, tmp_path / str(seed)))


@pytest.mark.parametrize("case", [case for case in BASES if hasattr(case.model(), "pooler")], ids=str)
def test_pooler_uses_first_token_with_left_padding(case: Case, tmp_path: Path) -> None:
    """transformers pools a padding column there, so its output for right padding is expected."""
    reference, model = pair(case, 0, tmp_path)
    left, right = random_batch(case, 0, side="left"), random_batch(case, 0)
    if "pooler_output" not in reference(**right):
        pytest.skip("this encoder has no pooler")
    assert_close(model(**left).pooler_output, reference(**right).pooler_output)
    is_full = left["attention_mask"].all(1)
    assert_close(reference(**left).pooler_output[is_full], model(**left).pooler_output[is_full])


@pytest.mark.fast_families("albert", "bart", "bert", "electra", "gpt2", "t5", "xlm", "xlnet")
@as_subtests(HEADS)
def test_head_outputs_losses_and_gradients(case: Case, tmp_path: Path) -> None:
    """One seed per head: seeds change the shape of the encoder."""
    seed = REFERENCE_CASES.index(case) % len(SEEDS)
    reference, model = pair(case, seed, tmp_path / str(case))
    assert_equal_outputs(case, seed, reference, model)
    # the span loss of transformers includes padding
    batch = random_batch(case, seed, masked="start_positions" not in case.model_class.loss_targets)
    batch |= make_targets(case, batch, seed=seed)
    if case.shifts_labels:  # transformers takes (batch, length) only, and counts labels at padding
        batch["labels"] = batch["labels"][:, :-1].masked_fill(batch["attention_mask"] == 0, -100)
    loss, expected = model(**batch).loss, reference(**batch).loss
    assert_close(loss, expected, "loss")
    loss.backward()
    expected.backward()
    assert_equal_gradients(model, reference, tmp_path / str(case) / "gradients")


@pytest.mark.parametrize("case", BASES, ids=str)
def test_hidden_states_and_attention_weights(case: Case, tmp_path: Path) -> None:
    reference, model = pair(case, 1, tmp_path)
    reference.set_attn_implementation("eager")
    batch = random_batch(case, 1)
    token_mask = batch["attention_mask"].flatten(0, -2) == 1
    expected = reference(**batch, output_hidden_states=True, output_attentions=True)
    prefix = "decoder_" if "decoder_hidden_states" in expected else ""
    hidden_states = model(**batch, output_hidden_states=True).hidden_states
    model.set_attn_implementation("eager")
    attentions = model(**batch, output_attentions=True).attentions
    states = [[layer[token_mask] for layer in layers] for layers in (hidden_states, expected[f"{prefix}hidden_states"])]
    assert_close(*states, "hidden states")
    attention_pair = (attentions, expected[f"{prefix}attentions"])
    weights = [[layer.transpose(1, 2)[token_mask] for layer in layers] for layers in attention_pair]
    assert_close(*weights, "attention weights")


@pytest.mark.parametrize(
    "case",
    [case for case in BASES if case.reference_class._supports_sdpa and case.model_class.accepts_4d_masks],
    ids=str,
)
def test_4d_attention_mask(case: Case, tmp_path: Path) -> None:
    reference, model = pair(case, 2, tmp_path)
    batch = random_batch(case, 2, masked=False)
    rows, length = batch["input_ids"].shape
    mask = torch.rand(rows, 1, length, length, generator=torch.Generator().manual_seed(0)) < 0.5
    mask |= torch.eye(length, dtype=torch.bool)
    assert_same_outputs(model(**batch, attention_mask=mask), reference(**batch, attention_mask=mask))


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in [*BASES, *REPRESENTATIVES]
        if case.has_reference and not case.family.traits.has_different_initialization
    ],
    ids=str,
)
def test_initial_weights_have_same_standard_deviation(case: Case, tmp_path: Path) -> None:
    torch.manual_seed(0)
    std = getattr(case.family.config(), "initializer_range", None)  # fixed in the linear layers of transformers' GPT
    fields = case.family_fields({"initializer_range": std, "hidden_size": 64, "embedding_size": 64})
    reference = case.reference_class(case.reference_config(**fields))
    case.model_class(case.config(**fields)).export_reference(tmp_path)
    exported = case.reference_class.from_pretrained(tmp_path)
    for (name, expected), weights in zip(reference.named_parameters(), exported.parameters(), strict=True):
        if expected.dim() > 1:
            tolerance = max(0.2, 4 / expected.numel() ** 0.5)  # four standard errors
            assert expected.std() > 0.005, name
            assert abs(weights.std() / expected.std() - 1) < tolerance, name
        else:
            assert weights.unique().tolist() == expected.unique().tolist() in ([0.0], [1.0]), name
