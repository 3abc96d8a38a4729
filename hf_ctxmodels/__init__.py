"""Static and contextual embedding models, from word2vec to T5, for Hugging Face transformers.

Importing the package registers all models and tokenizers with the Auto classes of transformers.
"""

from hf_ctxmodels.core.torch_environment import configure_torch

configure_torch()  # before the first import of torch

# isort: split
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_ctxmodels import models
from hf_ctxmodels.compression.int8.quantizer import register_int8
from hf_ctxmodels.compression.low_bits.quantizer import register_low_bits
from hf_ctxmodels.compression.low_rank.compression import register_low_rank
from hf_ctxmodels.core.attention_heads import prune_heads
from hf_ctxmodels.core.auto_classes import AutoModelForCoreference, AutoModelForDependencyParsing
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import inspection_mode
from hf_ctxmodels.downstream import multitask, networks
from hf_ctxmodels.downstream.multitask import CtxMultiTaskConfig, CtxMultiTaskModel
from hf_ctxmodels.downstream.networks import (
    CtxTaskNetworkConfig,
    CtxTaskNetworkForCoreference,
    CtxTaskNetworkForDependencyParsing,
    CtxTaskNetworkForQuestionAnswering,
    CtxTaskNetworkForSequenceClassification,
    CtxTaskNetworkForTokenClassification,
    CtxTaskNetworkModel,
    CtxTaskNetworkTokenizer,
)
from hf_ctxmodels.layers.attention.head_gates import disabled_heads
from hf_ctxmodels.models.albert import *
from hf_ctxmodels.models.bart import *
from hf_ctxmodels.models.bert import *
from hf_ctxmodels.models.cove import *
from hf_ctxmodels.models.cvt import *
from hf_ctxmodels.models.electra import *
from hf_ctxmodels.models.elmo import *
from hf_ctxmodels.models.encoder_decoder import *
from hf_ctxmodels.models.ernie import *
from hf_ctxmodels.models.ernie_gen import *
from hf_ctxmodels.models.gensen import *
from hf_ctxmodels.models.glove import *
from hf_ctxmodels.models.gpt import *
from hf_ctxmodels.models.gpt2 import *
from hf_ctxmodels.models.gpt3 import *
from hf_ctxmodels.models.grover import *
from hf_ctxmodels.models.infersent import *
from hf_ctxmodels.models.laser import *
from hf_ctxmodels.models.lmseq2seq import *
from hf_ctxmodels.models.mass import *
from hf_ctxmodels.models.roberta import *
from hf_ctxmodels.models.seqae import *
from hf_ctxmodels.models.spanbert import *
from hf_ctxmodels.models.structbert import *
from hf_ctxmodels.models.t5 import *
from hf_ctxmodels.models.transformer_xl import *
from hf_ctxmodels.models.ulmfit import *
from hf_ctxmodels.models.unilm import *
from hf_ctxmodels.models.word2vec import *
from hf_ctxmodels.models.xlm import *
from hf_ctxmodels.models.xlm_roberta import *
from hf_ctxmodels.models.xlnet import *
from hf_ctxmodels.registry import FAMILIES, get_family, register

if TYPE_CHECKING:
    from hf_ctxmodels.downstream.networks.features import ContextualFeatures, embed_words
    from hf_ctxmodels.inference import WordEncoder
    from hf_ctxmodels.objectives import (
        DataCollatorForCooccurrence,
        DataCollatorForMaskedLM,
        DataCollatorForMaskedLMWithNextSentence,
        DataCollatorForMaskedLMWithSentenceOrder,
        DataCollatorForMaskedLMWithStructure,
        DataCollatorForPermutationLM,
        DataCollatorForReplacedTokenDetection,
        DataCollatorForSpanBoundary,
        DataCollatorForSpanCorruption,
        DataCollatorForWindowPrediction,
    )

__version__ = "0.1.0"

__all__ = [
    "FAMILIES",
    "AutoModelForCoreference",
    "AutoModelForDependencyParsing",
    "ContextualFeatures",
    "CtxError",
    "CtxMultiTaskConfig",
    "CtxMultiTaskModel",
    "CtxTaskNetworkConfig",
    "CtxTaskNetworkForCoreference",
    "CtxTaskNetworkForDependencyParsing",
    "CtxTaskNetworkForQuestionAnswering",
    "CtxTaskNetworkForSequenceClassification",
    "CtxTaskNetworkForTokenClassification",
    "CtxTaskNetworkModel",
    "CtxTaskNetworkTokenizer",
    "DataCollatorForCooccurrence",
    "DataCollatorForMaskedLM",
    "DataCollatorForMaskedLMWithNextSentence",
    "DataCollatorForMaskedLMWithSentenceOrder",
    "DataCollatorForMaskedLMWithStructure",
    "DataCollatorForPermutationLM",
    "DataCollatorForReplacedTokenDetection",
    "DataCollatorForSpanBoundary",
    "DataCollatorForSpanCorruption",
    "DataCollatorForWindowPrediction",
    "WordEncoder",
    "disabled_heads",
    "embed_words",
    "get_family",
    "inspection_mode",
    "prune_heads",
]
__all__ += models.albert.__all__
__all__ += models.bart.__all__
__all__ += models.bert.__all__
__all__ += models.cove.__all__
__all__ += models.cvt.__all__
__all__ += models.electra.__all__
__all__ += models.elmo.__all__
__all__ += models.encoder_decoder.__all__
__all__ += models.ernie.__all__
__all__ += models.ernie_gen.__all__
__all__ += models.gensen.__all__
__all__ += models.glove.__all__
__all__ += models.gpt.__all__
__all__ += models.gpt2.__all__
__all__ += models.gpt3.__all__
__all__ += models.grover.__all__
__all__ += models.infersent.__all__
__all__ += models.laser.__all__
__all__ += models.lmseq2seq.__all__
__all__ += models.mass.__all__
__all__ += models.roberta.__all__
__all__ += models.seqae.__all__
__all__ += models.spanbert.__all__
__all__ += models.structbert.__all__
__all__ += models.t5.__all__
__all__ += models.transformer_xl.__all__
__all__ += models.ulmfit.__all__
__all__ += models.unilm.__all__
__all__ += models.word2vec.__all__
__all__ += models.xlm.__all__
__all__ += models.xlm_roberta.__all__
__all__ += models.xlnet.__all__

register()
multitask.register()
networks.register()
register_int8()
register_low_bits()
register_low_rank()


_LAZY_MODULES = {"ContextualFeatures": "downstream.networks.features", "embed_words": "downstream.networks.features"}
_LAZY_MODULES |= {"WordEncoder": "inference"}
_LAZY_MODULES |= {name: "objectives" for name in __all__ if name.startswith("DataCollator")}


def __getattr__(name: str) -> Any:
    """Import a name when it is used: the objectives are a quarter of the package's import time."""
    if name in _LAZY_MODULES:
        return getattr(import_module(f"hf_ctxmodels.{_LAZY_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
