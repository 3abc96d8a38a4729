"""Pretraining objectives: how documents become examples, their corruption and their targets."""

from hf_ctxmodels.objectives.back_translation import BackTranslation, DataCollatorForBackTranslation
from hf_ctxmodels.objectives.base import BaselineOptions, Objective
from hf_ctxmodels.objectives.bidirectional_lm import BidirectionalLM, DataCollatorForBidirectionalLM
from hf_ctxmodels.objectives.causal_lm import CausalLM, DataCollatorForCausalLM, DocumentLM, SegmentLM
from hf_ctxmodels.objectives.continual_tasks import ContinualTasks, DataCollatorForContinualTasks
from hf_ctxmodels.objectives.cooccurrence import Cooccurrence, DataCollatorForCooccurrence
from hf_ctxmodels.objectives.cross_lingual import (
    CrossLingualLM,
    DataCollatorForStreamMaskedLM,
    StreamCausalLM,
    StreamMaskedLM,
    TranslationLM,
)
from hf_ctxmodels.objectives.denoising import DataCollatorForDenoising, Denoising
from hf_ctxmodels.objectives.infilling import (
    DataCollatorForInfilling,
    DataCollatorForNoisySequenceToSequence,
    Infilling,
    NoisySequenceToSequence,
)
from hf_ctxmodels.objectives.masked_lm import DataCollatorForMaskedLM, FullSentences, MaskedLM
from hf_ctxmodels.objectives.masked_segment import (
    DataCollatorForMaskedSegment,
    DataCollatorForMaskedTranslation,
    MaskedSegment,
    MaskedTranslation,
)
from hf_ctxmodels.objectives.masking import MaskingRule, TokenMasker
from hf_ctxmodels.objectives.news_fields_lm import DataCollatorForNewsFieldsLM, NewsFieldsLM
from hf_ctxmodels.objectives.permutation_lm import DataCollatorForPermutationLM, PermutationLM, expand_permutation
from hf_ctxmodels.objectives.prefix_lm import DataCollatorForPrefixLM, PrefixLM
from hf_ctxmodels.objectives.replaced_token_detection import (
    DataCollatorForReplacedTokenDetection,
    ReplacedTokenDetection,
)
from hf_ctxmodels.objectives.sentence_order import DataCollatorForMaskedLMWithSentenceOrder, MaskedLMWithSentenceOrder
from hf_ctxmodels.objectives.sentence_pairs import DataCollatorForMaskedLMWithNextSentence, MaskedLMWithNextSentence
from hf_ctxmodels.objectives.sentence_tasks import DataCollatorForSentenceTasks, SentenceTasks
from hf_ctxmodels.objectives.sequence_autoencoding import DataCollatorForSequenceAutoencoding, SequenceAutoencoding
from hf_ctxmodels.objectives.source_target import DataCollatorForMaskedSequenceToSequence, MaskedSequenceToSequence
from hf_ctxmodels.objectives.span_boundary import DataCollatorForSpanBoundary, SpanBoundary
from hf_ctxmodels.objectives.span_corruption import DataCollatorForSpanCorruption, SpanCorruption
from hf_ctxmodels.objectives.structure import DataCollatorForMaskedLMWithStructure, MaskedLMWithStructure
from hf_ctxmodels.objectives.translation import (
    DataCollatorForTranslation,
    DataCollatorForTranslationWithLanguageModels,
    Translation,
    TranslationToLanguages,
    TranslationWithLanguageModels,
)
from hf_ctxmodels.objectives.unified_lm import DataCollatorForUnifiedLM, UnifiedLM
from hf_ctxmodels.objectives.unit_masking import DataCollatorForUnitMaskingWithPairs, UnitMaskingWithPairs
from hf_ctxmodels.objectives.window_prediction import ContinuousBagOfWords, DataCollatorForWindowPrediction, SkipGram
