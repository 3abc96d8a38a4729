"""Generic heads; a family binds each to its encoder in two lines (see `HeadModel`)."""

from hf_ctxmodels.heads.auxiliary_lm import WithLanguageModeling
from hf_ctxmodels.heads.base import (
    IGNORE_INDEX,
    HeadModel,
    ItemCounts,
    accuracy_counts,
    check_classes,
    check_target_shape,
    check_token_labels,
    cross_entropy_over_targets,
    has_targets,
    language_modeling_loss,
    loss_from_logits,
    mean_over_targets,
    number_of_targets,
    validate_sequence_targets,
    validate_targets,
)
from hf_ctxmodels.heads.causal_lm import ForCausalLM, next_token_targets
from hf_ctxmodels.heads.downstream import (
    ForMultipleChoice,
    ForQuestionAnswering,
    ForSequenceClassification,
    ForTokenClassification,
    problem_type_of,
    sequence_loss,
)
from hf_ctxmodels.heads.generation import PrepackingGenerationMixin
from hf_ctxmodels.heads.masked_lm import ForMaskedLM
from hf_ctxmodels.heads.pretraining import ForMaskedLMWithTasks, Prediction, PretrainingTask
from hf_ctxmodels.heads.seq2seq import (
    ConditionalGenerationOutput,
    DecoderInputs,
    ForConditionalGeneration,
    Seq2SeqHead,
)
from hf_ctxmodels.heads.text_pairs import ForTextPairClassification, SiameseEncoder
from hf_ctxmodels.layers.pooling import pair_features
