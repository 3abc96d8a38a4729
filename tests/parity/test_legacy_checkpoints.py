"""Checkpoints of older releases load without missing or unexpected keys and give the same outputs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from zoo import CASES, TIED_HEADS, Case, assert_same_outputs, load_strict, make_batch

Weights = dict[str, Tensor]
pytestmark = pytest.mark.all_families

LEGACY_CASES = [case for case in CASES if case.family.name in ("bert", "albert")]  # the layout of the first releases
LEGACY_BASES = [case for case in LEGACY_CASES if case.is_base]
LEGACY_TIED = [case for case in TIED_HEADS if case in LEGACY_CASES]


def with_tensorflow_names(weights: Weights, case: Case) -> Weights:
    """The names LayerNorm.gamma and LayerNorm.beta."""
    names = {name: name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta") for name in weights}
    return {names[name]: value for name, value in weights.items()}


def with_position_buffer(weights: Weights, case: Case) -> Weights:
    """Add `position_ids`, formerly a persistent buffer."""
    prefix = next(name for name in weights if "word_embeddings" in name).removesuffix("word_embeddings.weight")
    return {**weights, f"{prefix}position_ids": torch.arange(case.config().max_position_embeddings)[None]}


def with_tied_weights(weights: Weights, case: Case) -> Weights:
    """Add the decoder's weight and bias, which are tied to other tensors."""
    embeddings = next(value for name, value in weights.items() if "word_embeddings" in name)
    name, bias = next(item for item in weights.items() if item[0].endswith("predictions.bias"))
    decoder = name.replace("bias", "decoder")
    return {**weights, f"{decoder}.weight": embeddings, f"{decoder}.bias": bias}


def assert_loads(case: Case, folder: Path) -> None:
    model, batch = load_strict(case.model_class, folder), make_batch(case)
    assert_same_outputs(model(**batch), case.reference_model()(**batch), batch["attention_mask"])


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("references")
    for case in LEGACY_CASES:
        case.reference_model().save_pretrained(folder / str(case))
    return folder


@pytest.mark.parametrize(
    ("case", "change"),
    [
        *((case, change) for case in LEGACY_CASES for change in (with_tensorflow_names, with_position_buffer)),
        *((case, with_tied_weights) for case in LEGACY_TIED),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_old_weights(case: Case, change: Callable[[Weights, Case], Weights], references: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(references / str(case), tmp_path / "old")
    weights = load_file(folder / "model.safetensors")
    old_weights = change(weights, case)
    assert old_weights.keys() != weights.keys()
    save_file({name: value.contiguous().clone() for name, value in old_weights.items()}, folder / "model.safetensors")
    assert_loads(case, folder)


@pytest.mark.parametrize("case", LEGACY_TIED, ids=str)
def test_pytorch_bin_file(case: Case, references: Path, tmp_path: Path) -> None:
    """pytorch_model.bin with the tied decoder, as written by `torch.save`."""
    shutil.copy(references / str(case) / "config.json", tmp_path)
    torch.save(case.reference_model().state_dict(), tmp_path / "pytorch_model.bin")
    assert_loads(case, tmp_path)


@pytest.mark.parametrize("case", LEGACY_BASES, ids=str)
def test_legacy_configuration(case: Case, references: Path, tmp_path: Path) -> None:
    """Fields without effect are accepted; fields of another architecture raise."""
    folder = shutil.copytree(references / str(case), tmp_path / "old")
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"position_embedding_type": "absolute", "use_cache": True, "gradient_checkpointing": False}
    fields |= {"_num_labels": 2, "directionality": "bidi", "pooler_fc_size": 768, "is_decoder": False}
    (folder / "config.json").write_text(json.dumps(fields))
    assert_loads(case, folder)
    unsupported = {"position_embedding_type": "relative_key", "is_decoder": True, "add_cross_attention": True}
    for field, value in unsupported.items():
        (folder / "config.json").write_text(json.dumps(fields | {field: value}))
        with pytest.raises(ValueError, match=f"{field}={value!r}"):
            case.model_class.from_pretrained(folder)
