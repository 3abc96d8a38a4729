"""Look-up of the specification of any published model: of a family, a multi-task model or a task network."""

from transformers import PreTrainedConfig

from hf_ctxmodels.downstream import multitask, networks
from hf_ctxmodels.registry import get_family
from hf_ctxmodels.spec import FamilySpec


def get_spec(config: PreTrainedConfig) -> FamilySpec:
    """The specification of a configuration; raises CtxError if it is none of this package."""
    if isinstance(config, networks.CtxTaskNetworkConfig):
        return networks.SPEC
    if isinstance(config, multitask.CtxMultiTaskConfig):
        return multitask.make_spec(config)
    return get_family(config)
