"""Task heads. A family binds a head to its encoder by inheritance, see `HeadModel`."""

from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.heads.base import (
    HeadModel,
    ItemCounts,
    accuracy_counts,
    check_classes,
    check_target_shape,
    cross_entropy_over_targets,
    detached_loss,
    has_targets,
    labeled_targets,
    language_modeling_loss,
    loss_from_logits,
    mask_of_targets,
    mean_over_targets,
    number_of_targets,
    select_states,
    sequence_classification_loss,
    validate_sequence_targets,
    validate_targets,
    with_unused_parameters,
)
from hf_ctxmodels.heads.beam_search import ForBeamSearchQuestionAnswering
from hf_ctxmodels.heads.causal_lm import ForCausalLM, next_token_targets
from hf_ctxmodels.heads.downstream import (
    ForMultipleChoice,
    ForQuestionAnswering,
    ForSequenceClassification,
    ForTextPairClassification,
    ForTokenClassification,
    encode_text_pair,
    infer_problem_type,
    sequence_loss,
)
from hf_ctxmodels.heads.masked_lm import ForMaskedLM, build_mlm_head, is_masked_lm, masked_lm_loss
from hf_ctxmodels.heads.seq2seq import (
    ConditionalGenerationOutput,
    RecurrentDecoderInputs,
    RecurrentForConditionalGeneration,
    Seq2SeqHead,
)
