"""Heads beside adapters in files: the flexible heads of the library adapters that are heads of this package too."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.heads import ForMaskedLM, ForSequenceClassification, ForTokenClassification
from hf_ctxmodels.layers.lm_loss.cross_entropy import MaskedLMHead, ProjectedHead
from hf_ctxmodels.layers.transformer import FirstTokenPooler


@dataclass(frozen=True)
class FlexibleHead:
    """A head of a model as files hold it.

    Attributes:
        config: The entry `config` of `head_config.json`.
        modules: Number of a module there -> its name in the model.
    """

    config: Mapping[str, Any]
    modules: Mapping[str, str]

    def tensors(self, model: nn.Module, name: str) -> dict[str, Tensor]:
        """The parameters by their names in files."""
        return {
            f"heads.{name}.{number}.{key}": value
            for number, module in self.modules.items()
            for key, value in model.get_submodule(module).state_dict(keep_vars=True).items()
        }


def flexible_head(model: PreTrainedModel) -> FlexibleHead | None:
    """The model's head, if files have such a one."""
    config: Any = model.config
    if isinstance(model, ForMaskedLM) and isinstance(getattr(model, "mlm_head", None), MaskedLMHead):
        sizes = {"vocab_size": config.vocab_size, "embedding_size": model.get_input_embeddings().embedding_dim}
        form = {"activation_function": model.transform_activation or config.hidden_act, "layer_norm": True}
        fixed = {"head_type": "masked_lm", "layers": 2, "bias": True, "shift_labels": False, "label2id": None}
        return FlexibleHead(
            {**fixed, **sizes, **form}, {"0": "mlm_head.dense", "2": "mlm_head.norm", "3": "mlm_head.decoder"}
        )
    labels = {"num_labels": config.num_labels, "label2id": config.label2id}
    if isinstance(model, ForTokenClassification) and isinstance(model.classifier, nn.Linear):
        return FlexibleHead({"head_type": "tagging", "layers": 1, **labels}, {"1": "classifier"})
    if isinstance(model, ForSequenceClassification) and model.pooling is None:
        maps = _classifier(model)
        fixed = {"head_type": "classification", "layers": 2, "use_pooler": False, "bias": True, "dropout_prob": None}
        form = {"activation_function": model.classifier_activation or "tanh"}
        return None if maps is None else FlexibleHead({**fixed, **form, **labels}, maps)
    return None


def _classifier(model: Any) -> dict[str, str] | None:
    """The maps of a classifier on the first token's state: dense, activation, linear."""
    if isinstance(model.classifier, ProjectedHead):
        return {"1": "classifier.dense", "4": "classifier.out_proj"}
    pooled = isinstance(getattr(model.base_model, "pooler", None), FirstTokenPooler)
    return {"1": f"{model.base_model_prefix}.pooler.dense", "4": "classifier"} if pooled else None


@torch.no_grad()
def read_head(model: PreTrainedModel, entry: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str) -> bool:
    """Copy a file's head into the model's, if it is one of the same kind and shape.

    A decoder that is tied to the embeddings is untied where the file has another one.

    Returns:
        Whether it was copied.
    """
    own = flexible_head(model)
    if own is None or any(entry.get(key, own.config[key]) != own.config[key] for key in _compared(own)):
        return False
    targets = own.tensors(model, name)
    if set(targets) - set(tensors) or any(targets[key].shape != tensors[key].shape for key in targets):
        return False
    words = model.get_input_embeddings().weight
    for key, target in targets.items():
        value = tensors[key].to(target)
        if target is words:
            if not torch.equal(target, value):
                model.get_submodule("mlm_head.decoder").weight = nn.Parameter(value.clone())
                model.config.tie_word_embeddings = False
            continue
        target.copy_(value)
    return True


def _compared(own: FlexibleHead) -> list[str]:
    known = ("head_type", "layers", "activation_function", "layer_norm", "use_pooler", "num_labels", "vocab_size")
    return [key for key in known if key in own.config]


def head_to_write(model: PreTrainedModel) -> FlexibleHead:
    """The model's head.

    Raises:
        CtxError: Files have none like it.
    """
    head = flexible_head(model)
    if head is None:
        raise CtxError(
            f"Folders of adapters have no head like that of {type(model).__name__}.",
            hint="save the adapter without a head; save_pretrained writes the head with the model.",
        )
    return head
