"""One encoder of any family with a head for each of several tasks (Liu et al. 2019, arXiv 1901.11504, "MT-DNN").

It is no family: it has no layers, tokenizer or objective of its own, and its heads are those of its encoder's family,
whose `model.task(name)` gives them back as ordinary models. So it is registered beside the families.
"""

from transformers import AutoConfig, AutoModel, PreTrainedConfig

from hf_ctxmodels.core.remote_code import RemoteCodeStub, register_remote_code
from hf_ctxmodels.downstream.multitask.configuration import CtxMultiTaskConfig
from hf_ctxmodels.downstream.multitask.modeling import CtxMultiTaskModel
from hf_ctxmodels.registry import get_family
from hf_ctxmodels.spec import FamilySpec

__all__ = ["CtxMultiTaskConfig", "CtxMultiTaskModel", "get_spec", "register"]

_MODELS = {"AutoModel": CtxMultiTaskModel}


def get_spec(config: PreTrainedConfig) -> FamilySpec:
    """The family of a configuration; for one of several tasks what publishing needs, with the encoder's tokenizer.

    Raises:
        CtxError: It is a configuration of another package.
    """
    if not isinstance(config, CtxMultiTaskConfig):
        return get_family(config)
    family = get_family(config.encoder)
    return FamilySpec(
        name="multitask",
        paper=f"Liu et al. 2019, Multi-Task Deep Neural Networks (arXiv 1901.11504); the encoder: {family.paper}",
        config=CtxMultiTaskConfig,
        tokenizer=family.tokenizer,
        models=dict(_MODELS),
        sizes={},
        published={},
    )


def register() -> None:
    """Register with the Auto classes of transformers; idempotent."""
    AutoConfig.register(CtxMultiTaskConfig.model_type, CtxMultiTaskConfig, exist_ok=True)
    AutoModel.register(CtxMultiTaskConfig, CtxMultiTaskModel, exist_ok=True)
    register_remote_code(RemoteCodeStub(CtxMultiTaskConfig.model_type, CtxMultiTaskConfig, None, _MODELS))
