"""Checkpoints as older releases wrote them open without missing or unexpected keys, and give the same outputs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from zoo import CASES, TIED_HEADS, Case, assert_same_outputs, make_batch

from hf_ctxmodels.registry import FAMILIES

Weights = dict[str, Tensor]
# Families whose reference layout goes back to the first releases; a new one joins only if its checkpoints do.
OLD_FAMILIES = {"bert", "albert"} & set(FAMILIES)
OLD_CASES = [case for case in CASES if case.family.name in OLD_FAMILIES]
OLD_TIED = [case for case in TIED_HEADS if case.family.name in OLD_FAMILIES]


def old_norm_names(weights: Weights, case: Case) -> Weights:
    """LayerNorm.gamma and beta, of the TensorFlow release."""
    renamed = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): value for name, value in weights.items()}
    return {name.replace("LayerNorm.bias", "LayerNorm.beta"): value for name, value in renamed.items()}


def with_position_buffer(weights: Weights, case: Case) -> Weights:
    """`position_ids`, once saved as a persistent buffer."""
    prefix = next(name for name in weights if "word_embeddings" in name).removesuffix("word_embeddings.weight")
    return {**weights, f"{prefix}position_ids": torch.arange(case.config().max_position_embeddings)[None]}


def rewrite(source: Path, target: Path, case: Case, change: Callable[[Weights, Case], Weights]) -> None:
    """Copy a checkpoint with changed weights."""
    target.mkdir()
    shutil.copy(source / "config.json", target)
    weights = change(load_file(source / "model.safetensors"), case)
    save_file({name: value.contiguous().clone() for name, value in weights.items()}, target / "model.safetensors")


def assert_opens(case: Case, folder: Path) -> None:
    model, report = case.model_class.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    batch = make_batch(case)
    assert_same_outputs(model.eval()(**batch), case.reference_model()(**batch), batch["attention_mask"])


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("references")
    for case in OLD_CASES:
        case.reference_model().save_pretrained(root / str(case))
    return root


@pytest.mark.parametrize("case", OLD_CASES, ids=str)
def test_old_names(case: Case, references: Path, tmp_path: Path) -> None:
    for change in (old_norm_names, with_position_buffer):
        folder = tmp_path / change.__name__
        rewrite(references / str(case), folder, case, change)
        old = load_file(folder / "model.safetensors")
        assert old.keys() != load_file(references / str(case) / "model.safetensors").keys(), change
        assert_opens(case, folder)


@pytest.mark.parametrize("case", OLD_TIED, ids=str)
def test_tied_weights_stored_twice(case: Case, references: Path, tmp_path: Path) -> None:
    """The decoder's weight and bias beside the tensors they are tied to."""

    def repeat(weights: Weights, case: Case) -> Weights:
        words = next(value for name, value in weights.items() if "word_embeddings" in name)
        name, bias = next(item for item in weights.items() if item[0].endswith("predictions.bias"))
        decoder = name.replace("bias", "decoder")
        return {**weights, f"{decoder}.weight": words, f"{decoder}.bias": bias}

    rewrite(references / str(case), tmp_path / "old", case, repeat)
    assert_opens(case, tmp_path / "old")


@pytest.mark.parametrize("case", OLD_TIED, ids=str)
def test_torch_save(case: Case, references: Path, tmp_path: Path) -> None:
    """pytorch_model.bin, read with weights_only; with the tied decoder in it, as torch.save wrote it."""
    folder = tmp_path / "old"
    folder.mkdir()
    shutil.copy(references / str(case) / "config.json", folder)
    torch.save(case.reference_model().state_dict(), folder / "pytorch_model.bin")
    assert_opens(case, folder)


@pytest.mark.parametrize("case", [case for case in OLD_CASES if case.is_base], ids=str)
def test_old_configuration_file(case: Case, references: Path, tmp_path: Path) -> None:
    """Fields that reference files carry and this package has no use for."""
    rewrite(references / str(case), tmp_path / "old", case, lambda weights, case: weights)
    path = tmp_path / "old" / "config.json"
    extra = {"position_embedding_type": "absolute", "use_cache": True, "gradient_checkpointing": False}
    extra |= {"_num_labels": 2, "directionality": "bidi", "pooler_fc_size": 768, "is_decoder": False}
    path.write_text(json.dumps(json.loads(path.read_text()) | extra))
    assert_opens(case, tmp_path / "old")


@pytest.mark.parametrize("case", [case for case in OLD_CASES if case.is_base], ids=str)
def test_what_cannot_be_computed_is_refused(case: Case, references: Path, tmp_path: Path) -> None:
    """A checkpoint that needs other mathematics must not open with wrong outputs."""
    rewrite(references / str(case), tmp_path / "old", case, lambda weights, case: weights)
    path = tmp_path / "old" / "config.json"
    fields = json.loads(path.read_text())
    wrong = {"position_embedding_type": "relative_key", "is_decoder": True, "add_cross_attention": True}
    for field, value in wrong.items():
        path.write_text(json.dumps(fields | {field: value}))
        with pytest.raises(ValueError, match=f"{field}={value!r}"):
            case.model_class.from_pretrained(tmp_path / "old")
