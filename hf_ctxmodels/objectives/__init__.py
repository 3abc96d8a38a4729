"""Pretraining objectives: how documents become examples, their corruption and their targets."""

from hf_ctxmodels.objectives.autoregressive.bidirectional_lm import BidirectionalLM, DataCollatorForBidirectionalLM
from hf_ctxmodels.objectives.autoregressive.causal_lm import CausalLM, DataCollatorForCausalLM
from hf_ctxmodels.objectives.autoregressive.document_lm import DocumentLM
from hf_ctxmodels.objectives.autoregressive.news_fields_lm import DataCollatorForNewsFieldsLM, NewsFieldsLM
from hf_ctxmodels.objectives.autoregressive.permutation_lm import (
    DataCollatorForPermutationLM,
    PermutationLM,
    expand_permutation,
)
from hf_ctxmodels.objectives.autoregressive.sequence_autoencoding import (
    DataCollatorForSequenceAutoencoding,
    SequenceAutoencoding,
)
from hf_ctxmodels.objectives.base import BaselinePolicy, Objective
from hf_ctxmodels.objectives.components.masking import MaskingRule, TokenMasker
from hf_ctxmodels.objectives.cross_lingual.cross_lingual_masking import (
    CrossLingualLM,
    DataCollatorForStreamMaskedLM,
    StreamMaskedLM,
    TranslationLM,
)
from hf_ctxmodels.objectives.cross_lingual.language_streams import StreamCausalLM
from hf_ctxmodels.objectives.masked.full_sentences import FullSentences
from hf_ctxmodels.objectives.masked.masked_lm import DataCollatorForMaskedLM, MaskedLM
from hf_ctxmodels.objectives.masked.replaced_token_detection import (
    DataCollatorForReplacedTokenDetection,
    ReplacedTokenDetection,
)
from hf_ctxmodels.objectives.masked.span_boundary import DataCollatorForSpanBoundary, SpanBoundary
from hf_ctxmodels.objectives.multitask.continual_tasks import ContinualTasks, DataCollatorForContinualTasks
from hf_ctxmodels.objectives.multitask.sentence_tasks import DataCollatorForSentenceTasks, SentenceTasks
from hf_ctxmodels.objectives.pairs.next_sentence import (
    DataCollatorForMaskedLMWithNextSentence,
    MaskedLMWithNextSentence,
)
from hf_ctxmodels.objectives.pairs.sentence_order import (
    DataCollatorForMaskedLMWithSentenceOrder,
    MaskedLMWithSentenceOrder,
)
from hf_ctxmodels.objectives.pairs.structure import DataCollatorForMaskedLMWithStructure, MaskedLMWithStructure
from hf_ctxmodels.objectives.pairs.unified_lm import DataCollatorForUnifiedLM, UnifiedLM
from hf_ctxmodels.objectives.pairs.unit_masking import DataCollatorForUnitMaskingWithPairs, UnitMaskingWithPairs
from hf_ctxmodels.objectives.seq2seq.denoising import DataCollatorForDenoising, Denoising
from hf_ctxmodels.objectives.seq2seq.infilling import (
    DataCollatorForInfilling,
    DataCollatorForNoisySequenceToSequence,
    Infilling,
    NoisySequenceToSequence,
)
from hf_ctxmodels.objectives.seq2seq.masked_segment import DataCollatorForMaskedSegment, MaskedSegment
from hf_ctxmodels.objectives.seq2seq.masked_translation import DataCollatorForMaskedTranslation, MaskedTranslation
from hf_ctxmodels.objectives.seq2seq.source_target import (
    DataCollatorForMaskedSequenceToSequence,
    MaskedSequenceToSequence,
)
from hf_ctxmodels.objectives.seq2seq.span_corruption import DataCollatorForSpanCorruption, SpanCorruption
from hf_ctxmodels.objectives.seq2seq.translation import (
    DataCollatorForTranslation,
    DataCollatorForTranslationWithLanguageModels,
    Translation,
    TranslationToLanguages,
    TranslationWithLanguageModels,
)
from hf_ctxmodels.objectives.static.cooccurrence import Cooccurrence, DataCollatorForCooccurrence
from hf_ctxmodels.objectives.static.window_prediction import (
    ContinuousBagOfWords,
    DataCollatorForWindowPrediction,
    SkipGram,
)
