"""PEFT adapters on all Transformers: attention paths, training, merging and saving."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from zoo import HEADS, Case, assert_close, labeled_batch, scalar_loss

from hf_ctxmodels import CtxError
from hf_ctxmodels.core.config import CtxTransformerConfig
from hf_ctxmodels.downstream.finetuning import reinitialize_layers

peft = pytest.importorskip("peft", reason="needs PEFT, which the extra `dev` brings")

TRANSFORMERS = [case for case in HEADS if issubclass(case.family.config, CtxTransformerConfig)]
TASKS = {
    "AutoModelForSequenceClassification": "SEQ_CLS",
    "AutoModelForMultipleChoice": "SEQ_CLS",
    "AutoModelForTokenClassification": "TOKEN_CLS",
    "AutoModelForQuestionAnswering": "QUESTION_ANS",
}
WITH_TASK = [case for case in TRANSFORMERS if case.auto_name in TASKS]
all_families = pytest.mark.parametrize("family", list({case.family.name: None for case in TRANSFORMERS}))

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def add_lora(model: PreTrainedModel) -> Any:
    """Add LoRA with random weights to all linear and embedding layers, including heads and decoders."""
    layer_types = [torch.nn.Linear] if hasattr(model, "generator") else [torch.nn.Linear, torch.nn.Embedding]
    names = [name for name, module in model.named_modules() if type(module) in layer_types]
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False))


def save_and_reload(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder)


@pytest.mark.fast_families("bert", "t5")
@all_families
def test_adapters_train_merge_and_reload(family: str, tmp_path: Path) -> None:
    """The loss is equal with all logits, with padding, and for saved and merged adapters."""
    for case in (case for case in TRANSFORMERS if case.family.name == family):
        base, batch = case.model(), labeled_batch(case)
        if base.config.is_encoder_decoder:  # the EOS that starts each row attends to itself only: use the last token
            base.config.eos_token_id = None
        folder = tmp_path / str(case)
        base.save_pretrained(folder / "base")
        plain = scalar_loss(case, base, batch)
        adapted = add_lora(base)
        loss = scalar_loss(case, adapted, batch)
        assert abs(loss - plain) > 1e-3, f"{case}: the adapters have no effect"
        loss.backward()
        for name, weight in adapted.named_parameters():
            is_auxiliary = getattr(base, "has_auxiliary_lm_loss", False) and "lm_head" in name  # for training only
            if "lora_" in name and not is_auxiliary:
                rows = weight.grad.any(-1) if "qkv_proj.lora_B" in name else weight.grad.any()
                assert rows.all(), f"{case}: no gradient for {name}"
        if hasattr(base.config, "return_logits_with_labels"):
            base.config.return_logits_with_labels = True
            assert_close(scalar_loss(case, adapted, batch), loss, f"{case}: the loss of all logits")
            base.config.return_logits_with_labels = None
        base.config.unpad = False
        assert_close(scalar_loss(case, adapted, batch), loss, f"{case}: the padded path")
        adapted.save_pretrained(folder / "adapter")
        pretrained = case.model_class.from_pretrained(folder / "base")
        reloaded = peft.PeftModel.from_pretrained(pretrained, folder / "adapter")
        assert_close(scalar_loss(case, reloaded, batch), loss, f"{case}: the reopened adapter")
        merged = adapted.merge_and_unload()
        assert_close(scalar_loss(case, merged, batch), loss, f"{case}: the merged weights")
        reopened = save_and_reload(merged, folder / "merged")
        assert_close(scalar_loss(case, reopened, batch), loss, f"{case}: the reopened merged weights")


@pytest.mark.parametrize(
    "case", [case for case in TRANSFORMERS if getattr(case.model_class, "has_auxiliary_lm_loss", False)], ids=str
)
def test_adapted_word_embeddings_are_used_in_auxiliary_loss(case: Case) -> None:
    """Heads without an output layer use the word embeddings for the loss in training."""
    model, batch = case.model(lm_loss_weight=0.5), labeled_batch(case)
    torch.manual_seed(1)
    targets = ["word_embeddings"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)).train()
    loss = scalar_loss(case, adapted, batch)
    merged = adapted.merge_and_unload().train()
    assert_close(scalar_loss(case, merged, batch), loss, "the merged weights")


@pytest.mark.fast_families("bert", "t5")
@pytest.mark.parametrize("family", list({case.family.name: None for case in WITH_TASK}))
def test_task_type_sets_target_modules(family: str, tmp_path: Path) -> None:
    """Default targets are the attention projections; newly initialized modules are trained and saved."""
    for case in (case for case in WITH_TASK if case.family.name == family):
        folder, batch = tmp_path / str(case), labeled_batch(case)
        encoder = case.model().base_model
        if getattr(encoder, "pooler", None) is not None:
            encoder.pooler = None  # as in a masked language model
        encoder.save_pretrained(folder / "base")

        def load_model(seed: int, folder: Path = folder, case: Case = case) -> PreTrainedModel:
            torch.manual_seed(seed)
            return case.model_class.from_pretrained(folder / "base", num_labels=case.num_labels)

        adapted = peft.get_peft_model(load_model(1), peft.LoraConfig(task_type=TASKS[case.auto_name]))
        adapters = [name for name, _ in adapted.named_parameters() if ".lora_A" in name]
        assert {name.partition(".lora_A")[0].rpartition(".")[2] for name in adapters} == {"qkv_proj"}, case
        optimizer = torch.optim.SGD(adapted.parameters(), 0.1)
        scalar_loss(case, adapted, batch).backward()
        optimizer.step()
        adapted.save_pretrained(folder / "adapter")
        reloaded = peft.PeftModel.from_pretrained(load_model(2), folder / "adapter")
        assert_close(scalar_loss(case, reloaded, batch), scalar_loss(case, adapted, batch), f"{case}: reopened")
        ia3_model = peft.get_peft_model(load_model(1), peft.IA3Config(task_type=TASKS[case.auto_name]))
        scalar_loss(case, ia3_model, batch).backward()
        ia3_gradients = [weight.grad for name, weight in ia3_model.named_parameters() if "ia3_" in name]
        assert ia3_gradients, f"{case}: IA3"
        assert all(gradient.any() for gradient in ia3_gradients), f"{case}: IA3"


PREFIX_TASKS = {"AutoModelForSequenceClassification": "SEQ_CLS", "AutoModelForCausalLM": "CAUSAL_LM"}
PREFIX_FAMILIES = ("gpt", "gpt2", "gpt3", "grover")


@pytest.mark.parametrize(
    "case",
    [case for case in TRANSFORMERS if case.family.name in PREFIX_FAMILIES and case.auto_name in PREFIX_TASKS],
    ids=str,
)
def test_prefix_tuning_of_decoders(case: Case) -> None:
    """A padded batch, with or without the mask of trailing padding, has the loss of its unpadded rows."""
    config = case.config()
    torch.manual_seed(1)
    adapted = peft.get_peft_model(
        case.model(),
        peft.PrefixTuningConfig(
            task_type=PREFIX_TASKS[case.auto_name],
            num_virtual_tokens=3,
            num_layers=config.num_hidden_layers,
            token_dim=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
        ),
    )
    batch = labeled_batch(case, (12, 7, 9), side="right")
    plain = scalar_loss(case, adapted.get_base_model(), batch)
    losses, num_targets = [], []
    for row, length in enumerate((12, 7, 9)):
        inputs = {name: tensor[row : row + 1] for name, tensor in batch.items()}
        inputs = {name: tensor[:, :length] if tensor.dim() > 1 else tensor for name, tensor in inputs.items()}
        losses.append(adapted(**inputs).loss)
        num_targets.append(inputs["labels"].ne(-100)[:, 1:].sum() if case.shifts_labels else torch.tensor(1))
    weights = torch.stack(num_targets) / torch.stack(num_targets).sum()
    expected = (torch.stack(losses) * weights).sum()
    assert abs(expected - plain) > 1e-3, "the prefix has no effect"
    loss = adapted(**batch).loss
    assert_close(loss, expected)
    loss.backward()
    assert adapted.prompt_encoder["default"].embedding.weight.grad.any()
    del batch["attention_mask"]
    assert_close(adapted(**batch).loss, expected)


BERT, XLNET = (next(case for case in WITH_TASK if case.family.name == name) for name in ("bert", "xlnet"))


def test_only_new_modules_are_saved(tmp_path: Path) -> None:
    """A pretrained pooler is not saved; an adapter inside a new module, which would not be saved, raises."""
    BERT.model().save_pretrained(tmp_path / "bert")
    model = BERT.model_class.from_pretrained(tmp_path / "bert")
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS"))
    assert adapted.peft_config["default"].modules_to_save == ["classifier", "score"]
    with pytest.raises(CtxError, match="merge_and_unload"):
        adapted.export_reference(tmp_path / "reference")
    XLNET.model().base_model.save_pretrained(tmp_path / "xlnet")
    model = XLNET.model_class.from_pretrained(tmp_path / "xlnet")
    assert model.newly_initialized_modules == ("summary", "classifier")
    with pytest.raises(CtxError, match=r"modules_to_save=\['summary'\]"):
        peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", target_modules="all-linear"))
    # a re-initialized layer counts as new
    model = BERT.model_class.from_pretrained(tmp_path / "bert")
    reinitialize_layers(model, 1, seed=1, pooler=True)
    last = f"bert.layers.{model.config.num_hidden_layers - 1}"
    with pytest.raises(CtxError, match=rf"modules_to_save=\['{last}', 'bert.pooler'\]"):
        peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(task_type="SEQ_CLS"))
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", modules_to_save=[last])).eval()
    adapted.save_pretrained(tmp_path / "drawn")
    reloaded = peft.PeftModel.from_pretrained(BERT.model_class.from_pretrained(tmp_path / "bert"), tmp_path / "drawn")
    batch = labeled_batch(BERT)
    assert_close(scalar_loss(BERT, reloaded.eval(), batch), scalar_loss(BERT, adapted, batch), "reopened")


@pytest.mark.parametrize(("tie_generator", "targets"), [("all", None), ("embeddings", ["word_embeddings"])])
def test_adapters_on_shared_encoders_raise(tie_generator: str, targets: list[str] | None) -> None:
    electra = next(case for case in TRANSFORMERS if str(case) == "electra-AutoModelForPreTraining")
    model = electra.model(tie_generator=tie_generator, generator_size=1.0)
    with pytest.raises(CtxError, match="tie_generator"):
        peft.get_peft_model(model, peft.LoraConfig(target_modules=targets))


PROGRAM = """
import sys
import hf_ctxmodels
sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 9}
model = hf_ctxmodels.CtxBertForSequenceClassification(hf_ctxmodels.CtxBertConfig(**sizes))
assert "peft" not in sys.modules
from peft import LoraConfig, get_peft_model
assert any("qkv_proj.lora_A" in name for name in get_peft_model(model, LoraConfig(task_type="SEQ_CLS")).state_dict())
"""


@pytest.mark.slow
def test_peft_imported_after_model_creation() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
