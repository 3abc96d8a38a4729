"""Task networks on contextual word vectors (Peters et al. 2018, section 3.3).

Task networks are not a family: their words are embedded by models of any families. They are registered in addition to
the families.
"""

from transformers import AutoConfig, AutoTokenizer

from hf_ctxmodels.core.auto_classes import get_auto_class
from hf_ctxmodels.core.remote_code import register_remote_code
from hf_ctxmodels.downstream.networks.configuration import CtxTaskNetworkConfig
from hf_ctxmodels.downstream.networks.coreference import CtxTaskNetworkForCoreference
from hf_ctxmodels.downstream.networks.modeling import (
    CtxTaskNetworkForQuestionAnswering,
    CtxTaskNetworkForSequenceClassification,
    CtxTaskNetworkForTokenClassification,
    CtxTaskNetworkModel,
)
from hf_ctxmodels.downstream.networks.parsing import CtxTaskNetworkForDependencyParsing
from hf_ctxmodels.downstream.networks.tokenization import CtxTaskNetworkTokenizer
from hf_ctxmodels.spec import FamilySpec

SPEC = FamilySpec(
    name="task_network",
    paper="Peters et al. 2018, Deep Contextualized Word Representations (arXiv 1802.05365), section 3.3",
    config=CtxTaskNetworkConfig,
    tokenizer=CtxTaskNetworkTokenizer,
    models={
        "AutoModel": CtxTaskNetworkModel,
        "AutoModelForQuestionAnswering": CtxTaskNetworkForQuestionAnswering,
        "AutoModelForSequenceClassification": CtxTaskNetworkForSequenceClassification,
        "AutoModelForCoreference": CtxTaskNetworkForCoreference,
        "AutoModelForDependencyParsing": CtxTaskNetworkForDependencyParsing,
        "AutoModelForTokenClassification": CtxTaskNetworkForTokenClassification,
    },
    sizes={},
    published={},
)
"""The description of task networks for the Hub."""


def register() -> None:
    """Register the networks with the Auto classes of transformers; idempotent."""
    AutoConfig.register(CtxTaskNetworkConfig.model_type, CtxTaskNetworkConfig, exist_ok=True)
    AutoTokenizer.register(CtxTaskNetworkConfig, tokenizer_class=CtxTaskNetworkTokenizer, exist_ok=True)
    for name, model_class in SPEC.models.items():
        get_auto_class(name).register(CtxTaskNetworkConfig, model_class, exist_ok=True)
    register_remote_code(SPEC.stub)
