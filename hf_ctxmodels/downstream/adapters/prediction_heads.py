"""Prediction heads in adapter files: AdapterHub's flexible heads that correspond to heads of this package."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_ctxmodels.heads import ForSequenceClassification, ForTokenClassification, is_masked_lm
from hf_ctxmodels.layers.lm_loss.cross_entropy import MaskedLMHead, ProjectedHead
from hf_ctxmodels.layers.transformer import FirstTokenPooler

_COMPARED_FIELDS = {
    "head_type",
    "layers",
    "activation_function",
    "layer_norm",
    "use_pooler",
    "num_labels",
    "vocab_size",
}


class FlexibleHead(NamedTuple):
    """The entry `config` of `head_config.json`, and the names of the modules in files and in the model."""

    config: Mapping[str, Any]
    modules: Mapping[str, str]

    def tensors(self, model: nn.Module, name: str) -> dict[str, Tensor]:
        """The parameters by their names in files."""
        return {
            f"heads.{name}.{index}.{key}": value
            for index, module in self.modules.items()
            for key, value in model.get_submodule(module).state_dict(keep_vars=True).items()
        }


def find_flexible_head(model: PreTrainedModel) -> FlexibleHead | None:
    """The flexible head that corresponds to the model's head, or None."""
    config: Any = model.config
    if is_masked_lm(model) and isinstance(getattr(model, "mlm_head", None), MaskedLMHead):
        values = {
            "head_type": "masked_lm",
            "layers": 2,
            "bias": True,
            "shift_labels": False,
            "label2id": None,
            "vocab_size": config.vocab_size,
            "embedding_size": model.get_input_embeddings().embedding_dim,
            "activation_function": getattr(model, "transform_activation", None) or config.hidden_act,
            "layer_norm": True,
        }
        return FlexibleHead(values, {"0": "mlm_head.dense", "2": "mlm_head.norm", "3": "mlm_head.decoder"})
    labels = {"num_labels": config.num_labels, "label2id": config.label2id}
    if isinstance(model, ForTokenClassification) and isinstance(model.classifier, nn.Linear):
        return FlexibleHead({"head_type": "tagging", "layers": 1, **labels}, {"1": "classifier"})
    if isinstance(model, ForSequenceClassification) and model.pooling is None:
        values = {
            "head_type": "classification",
            "layers": 2,
            "use_pooler": False,
            "bias": True,
            "dropout_prob": None,
            "activation_function": model.classifier_activation or getattr(config, "pooler_act", "tanh"),
            **labels,
        }
        if isinstance(model.classifier, ProjectedHead):
            return FlexibleHead(values, {"1": "classifier.dense", "4": "classifier.out_proj"})
        if isinstance(getattr(model.base_model, "pooler", None), FirstTokenPooler):
            return FlexibleHead(values, {"1": f"{model.base_model_prefix}.pooler.dense", "4": "classifier"})
    return None


@torch.no_grad()
def load_head(model: PreTrainedModel, entry: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str) -> bool:
    """Copy a file's head into the model's head, if both have the same form and shapes; returns whether it was copied.

    A decoder tied to the embeddings is untied if the file has different weights.
    """
    head = find_flexible_head(model)
    if head is None or any(
        entry.get(key, head.config[key]) != head.config[key] for key in _COMPARED_FIELDS & {*head.config}
    ):
        return False
    targets = head.tensors(model, name)
    if set(targets) - set(tensors) or any(targets[key].shape != tensors[key].shape for key in targets):
        return False
    embedding_matrix = model.get_input_embeddings().weight
    for key, target in targets.items():
        value = tensors[key].to(target)
        if target is not embedding_matrix:
            target.copy_(value)
        elif not torch.equal(target, value):
            model.get_submodule("mlm_head.decoder").weight = nn.Parameter(value.clone())
            model.config.tie_word_embeddings = False
    return True
