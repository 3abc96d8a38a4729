"""The faults of all rooms."""

from adapters_faults import ADAPTERS_FAULTS
from core_faults import CORE_FAULTS
from data_faults import DATA_FAULTS
from distillation_faults import DISTILLATION_FAULTS
from docs_faults import DOCS_FAULTS
from ernie_faults import ERNIE_FAULTS
from fault import Fault
from finetuning_faults import FINETUNING_FAULTS
from generation_faults import GENERATION_FAULTS
from gpt_faults import GPT_FAULTS
from heads_faults import HEADS_FAULTS
from layers_faults import LAYERS_FAULTS
from mass_faults import MASS_FAULTS
from models_faults import MODELS_FAULTS
from multitask_faults import MULTITASK_FAULTS
from quantize_faults import QUANTIZE_FAULTS
from seq2seq_faults import SEQ2SEQ_FAULTS
from spanbert_faults import SPANBERT_FAULTS
from t5_faults import T5_FAULTS
from training_faults import TRAINING_FAULTS
from transfer_faults import TRANSFER_FAULTS
from unilm_faults import UNILM_FAULTS
from xlm_faults import XLM_FAULTS

__all__ = ["FAULTS", "Fault"]

FAULTS = [
    *CORE_FAULTS,
    *LAYERS_FAULTS,
    *HEADS_FAULTS,
    *MODELS_FAULTS,
    *MULTITASK_FAULTS,
    *ADAPTERS_FAULTS,
    *DISTILLATION_FAULTS,
    *SPANBERT_FAULTS,
    *GPT_FAULTS,
    *XLM_FAULTS,
    *ERNIE_FAULTS,
    *SEQ2SEQ_FAULTS,
    *T5_FAULTS,
    *MASS_FAULTS,
    *UNILM_FAULTS,
    *DATA_FAULTS,
    *TRAINING_FAULTS,
    *TRANSFER_FAULTS,
    *FINETUNING_FAULTS,
    *GENERATION_FAULTS,
    *QUANTIZE_FAULTS,
    *DOCS_FAULTS,
]
