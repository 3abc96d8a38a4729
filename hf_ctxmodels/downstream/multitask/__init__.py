"""A shared encoder of any family with a head for each of several tasks (Liu et al. 2019, arXiv 1901.11504, "MT-DNN").

Multi-task models are not a family: layers, tokenizer and heads belong to the encoder's family, and `model.task(name)`
returns a plain model of this family. They are registered in addition to the families.
"""

from transformers import AutoConfig, AutoModel

from hf_ctxmodels.core.remote_code import RemoteCodeStub, register_remote_code
from hf_ctxmodels.downstream.multitask.configuration import CtxMultiTaskConfig
from hf_ctxmodels.downstream.multitask.modeling import CtxMultiTaskModel
from hf_ctxmodels.registry import get_family
from hf_ctxmodels.spec import FamilySpec

_MODELS = {"AutoModel": CtxMultiTaskModel}


def make_spec(config: CtxMultiTaskConfig) -> FamilySpec:
    """The specification of a multi-task model, with the encoder's tokenizer."""
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
    """Register the model with the Auto classes of transformers; idempotent."""
    AutoConfig.register(CtxMultiTaskConfig.model_type, CtxMultiTaskConfig, exist_ok=True)
    AutoModel.register(CtxMultiTaskConfig, CtxMultiTaskModel, exist_ok=True)
    register_remote_code(RemoteCodeStub(CtxMultiTaskConfig, None, _MODELS))
