"""Equal to transformers over random small configurations: outputs, losses and gradients in single precision."""

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
    assert_close,
    assert_same_outputs,
    grouped_by_family,
    make_batch,
    make_targets,
    tensors_of,
)

SEEDS = range(6)
BASES = [case for case in REFERENCE_CASES if case.is_base]
HEADS = [case for case in REFERENCE_CASES if not case.is_base]
ACTIVATIONS = ("gelu", "relu", "gelu_new", "silu", "tanh")


def random_changes(seed: int) -> dict[str, Any]:
    """Fields of a random small configuration, also such as few families have. The number of words stays that of the
    batches."""
    draw = np.random.default_rng(seed)
    heads = int(draw.choice([1, 2, 3, 4, 6]))
    changes = {
        "hidden_size": heads * int(draw.choice([4, 8, 12])),
        "num_attention_heads": heads,
        "num_hidden_layers": int(draw.integers(1, 5)),
        "intermediate_size": int(draw.integers(5, 90)),
        "hidden_act": str(draw.choice(ACTIVATIONS)),
        "layer_norm_eps": float(draw.choice([1e-12, 1e-5, 1e-3])),
        "max_position_embeddings": int(draw.integers(20, 50)),
        "initializer_range": float(draw.choice([0.02, 0.1, 0.2])),
    }
    layers = changes["num_hidden_layers"]
    return changes | {
        "embedding_size": int(draw.choice([8, 20, changes["hidden_size"]])),
        "num_hidden_groups": int(draw.choice([groups for groups in range(1, layers + 1) if layers % groups == 0])),
        "inner_group_num": int(draw.integers(1, 3)),
    }


def random_batch(case: Case, seed: int, *, side: str | None = None, masked: bool = True) -> Batch:
    """Rows of random lengths; pairs (two segments) for even seeds, singles for odd ones."""
    draw = np.random.default_rng(seed + 100)
    lengths = [int(length) for length in draw.integers(1, 18, size=5)]
    batch = make_batch(case, lengths, side=side, seed=seed, masked=masked)
    if seed % 2:
        batch.pop("token_type_ids", None)
    return batch


def pair(case: Case, seed: int, folder: Any, **changes: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A random reference model, and ours opened from its checkpoint."""
    reference = case.reference_model(seed, **case.reference_fields(random_changes(seed)), **changes)
    reference.save_pretrained(folder)
    return reference, case.model_class.from_pretrained(folder).eval()


def assert_outputs_of_the_reference(case: Case, seed: int, reference: PreTrainedModel, ours: PreTrainedModel) -> None:
    """With a mask, without one, and padded on the other side."""
    for masked in (True, False):
        batch = random_batch(case, seed, masked=masked)
        where = f"of seed {seed}, masked: {masked}"
        assert_same_outputs(ours(**batch), reference(**batch), batch.get("attention_mask"), where=where)
    other = random_batch(case, seed, side="left" if case.padding_side == "right" else "right")
    if "position_ids" in other and "position_ids" not in inspect.signature(reference.forward).parameters:
        return  # it counts columns, and cannot be told otherwise
    expected, got = tensors_of(reference(**other)), tensors_of(ours(**other))
    if case.is_base:  # the reference pools a column that is padding here; ours pools a token
        expected = {"last_hidden_state": expected["last_hidden_state"]}
    per_token = {name: value for name, value in expected.items() if value.shape[:2] == other["input_ids"].shape[:2]}
    per_token = {name: value for name, value in per_token.items() if not case.has_choices}
    for name, value in per_token.items():
        tokens = other["attention_mask"] == 1
        assert_close(got[name][tokens], value[tokens], f"{name} of seed {seed}, padded on the other side")


@pytest.mark.parametrize("case", BASES, ids=str)
def test_outputs_of_encoders(case: Case, tmp_path: Any) -> None:
    for seed in SEEDS:
        assert_outputs_of_the_reference(case, seed, *pair(case, seed, tmp_path / str(seed)))


@pytest.mark.parametrize("case", [case for case in BASES if hasattr(case.model(), "pooler")], ids=str)
def test_pooled_output_with_left_padding_is_that_of_the_first_token(case: Case, tmp_path: Any) -> None:
    """Where the reference reads a padding position, ours gives what both give with padding on the right."""
    reference, ours = pair(case, 0, tmp_path)
    left, right = random_batch(case, 0, side="left"), random_batch(case, 0)
    if "pooler_output" not in reference(**right):
        pytest.skip("this encoder has no pooler")
    assert_close(ours(**left).pooler_output, reference(**right).pooler_output)
    full = random_batch(case, 0, side="left")["attention_mask"].all(1)
    assert_close(reference(**left).pooler_output[full], ours(**left).pooler_output[full])


@grouped_by_family(HEADS)
def test_outputs_losses_and_gradients_of_heads(cases: list[Case], tmp_path: Any, subtests: pytest.Subtests) -> None:
    """Every seed for the encoders, one for each head: seeds change the shape of the encoder."""
    for case in cases:
        with subtests.test(str(case)):
            _compare_head(case, REFERENCE_CASES.index(case) % len(SEEDS), tmp_path / str(case))


def _compare_head(case: Case, seed: int, tmp_path: Path) -> None:
    """Gradients are compared as gradients of the reference's parameters, by exporting ours."""
    reference, ours = pair(case, seed, tmp_path / "reference")
    assert_outputs_of_the_reference(case, seed, reference, ours)
    # The reference's span loss has padding among its candidates, ours has not.
    batch = random_batch(case, seed, masked="start_positions" not in case.model_class.loss_targets)
    batch |= make_targets(case, batch, seed=seed)
    if case.shifts_labels:  # the reference takes (batch, length) only, and counts labels at padding
        batch["labels"] = batch["labels"][:, :-1].masked_fill(batch["attention_mask"] == 0, -100)
    expected, got = reference(**batch).loss, ours(**batch).loss
    assert_close(got, expected, "loss")
    expected.backward()
    got.backward()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(_gradient(parameter))
    ours.export_reference(tmp_path / "gradients")
    exported = case.reference_class.from_pretrained(tmp_path / "gradients")
    for (name, gradient), parameter in zip(exported.named_parameters(), reference.parameters(), strict=True):
        # a table of more segments than the reference's is exported whole
        assert_close(gradient[: len(parameter)], _gradient(parameter), f"gradient of {name}")


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Zero where none arrived."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


@pytest.mark.parametrize("case", BASES, ids=str)
def test_recorded_states_and_attention(case: Case, tmp_path: Any) -> None:
    reference, ours = pair(case, 1, tmp_path)
    reference.set_attn_implementation("eager")
    batch = random_batch(case, 1)
    tokens = batch["attention_mask"].flatten(0, -2) == 1
    outputs = reference(**batch, output_hidden_states=True, output_attentions=True)
    decoded = "decoder_" if "decoder_hidden_states" in outputs else ""
    expected_states, expected_weights = (outputs[decoded + name] for name in ("hidden_states", "attentions"))
    states = ours(**batch, output_hidden_states=True).hidden_states
    ours.set_attn_implementation("eager")
    weights = ours(**batch, output_attentions=True).attentions
    for number, (got, wanted) in enumerate(zip(states, expected_states, strict=True)):
        assert_close(got[tokens], wanted[tokens], f"hidden state {number}")
    for number, (got, wanted) in enumerate(zip(weights, expected_weights, strict=True)):
        assert_close(got.transpose(1, 2)[tokens], wanted.transpose(1, 2)[tokens], f"attention of layer {number}")


@pytest.mark.parametrize(
    "case",
    [case for case in BASES if case.reference_class._supports_sdpa and case.model_class.accepts_4d_masks],
    ids=str,
)
def test_ready_four_dimensional_mask(case: Case, tmp_path: Any) -> None:
    """Such masks go to the attention function as they are, on padded rows."""
    reference, ours = pair(case, 2, tmp_path)
    batch = random_batch(case, 2, masked=False)
    length = batch["input_ids"].shape[1]
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(batch["input_ids"].shape[0], 1, length, length, generator=generator) < 0.5
    mask |= torch.eye(length, dtype=torch.bool)
    assert_same_outputs(ours(**batch, attention_mask=mask), reference(**batch, attention_mask=mask))


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in [*BASES, *REPRESENTATIVES]
        if case.has_reference and not case.family.traits.has_different_initialization
    ],
    ids=str,
)
def test_initial_weights_have_the_same_spread(case: Case, tmp_path: Any) -> None:
    """Models trained from scratch start alike: equal standard deviations of every kind of weight."""
    torch.manual_seed(0)
    usual = getattr(case.family.config(), "initializer_range", None)  # maps of GPT's reference have no other
    changes = case.family_fields({"initializer_range": usual, "hidden_size": 64, "embedding_size": 64})
    reference = case.reference_class(case.reference_config(**changes))
    case.model_class(case.config(**changes)).export_reference(tmp_path)
    ours = case.reference_class.from_pretrained(tmp_path)
    for (name, expected), found in zip(reference.named_parameters(), ours.parameters(), strict=True):
        if expected.dim() > 1:
            spread = max(0.2, 4 / expected.numel() ** 0.5)  # four standard errors of so few numbers, on both sides
            assert expected.std() > 0.005, name
            assert abs(found.std() / expected.std() - 1) < spread, name
        else:
            assert found.unique().tolist() == expected.unique().tolist() in ([0.0], [1.0]), name
