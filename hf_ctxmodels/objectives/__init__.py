"""Pretraining objectives: rows made of documents, their corruption and their targets."""

from hf_ctxmodels.objectives.base import Objective
from hf_ctxmodels.objectives.baseline import BaselinePolicy
from hf_ctxmodels.objectives.bidirectional_lm import BidirectionalLM, DataCollatorForBidirectionalLanguageModeling
from hf_ctxmodels.objectives.causal_lm import CausalLM, DataCollatorForRunningText
from hf_ctxmodels.objectives.components.masking import MaskingRule, TokenMasker
from hf_ctxmodels.objectives.continual_tasks import ContinualTasks, DataCollatorForContinualTasks
from hf_ctxmodels.objectives.cross_lingual_masking import (
    CrossLingualLM,
    DataCollatorForCrossLingualMasking,
    StreamMaskedLM,
    TranslationLM,
)
from hf_ctxmodels.objectives.denoising import DataCollatorForDenoising, Denoising
from hf_ctxmodels.objectives.document_lm import DocumentLM
from hf_ctxmodels.objectives.full_sentences import FullSentences
from hf_ctxmodels.objectives.infilling import (
    DataCollatorForInfilling,
    DataCollatorForNoisyTargets,
    Infilling,
    NoisySequenceToSequence,
)
from hf_ctxmodels.objectives.language_streams import DataCollatorForLanguageStreams, StreamCausalLM
from hf_ctxmodels.objectives.masked_lm import DataCollatorForMaskedLanguageModeling, MaskedLM
from hf_ctxmodels.objectives.masked_segment import DataCollatorForMaskedSegments, MaskedSegment
from hf_ctxmodels.objectives.masked_translation import DataCollatorForMaskedTranslation, MaskedTranslation
from hf_ctxmodels.objectives.news_fields import DataCollatorForNewsFields, NewsFieldsLM
from hf_ctxmodels.objectives.next_sentence import DataCollatorForNextSentencePrediction, MaskedLMWithNextSentence
from hf_ctxmodels.objectives.permutation_lm import PermutationLM
from hf_ctxmodels.objectives.permutation_order import DataCollatorForPermutationLanguageModeling, expand_permutation
from hf_ctxmodels.objectives.replaced_token import DataCollatorForReplacedTokenDetection, ReplacedTokenDetection
from hf_ctxmodels.objectives.sentence_order import DataCollatorForSentenceOrderPrediction, MaskedLMWithSentenceOrder
from hf_ctxmodels.objectives.sentence_tasks import DataCollatorForSentenceTasks, SentenceTasks
from hf_ctxmodels.objectives.sequence_autoencoder import DataCollatorForSequenceAutoencoding, SequenceAutoencoding
from hf_ctxmodels.objectives.source_target import DataCollatorForMaskedTargets, MaskedSequenceToSequence
from hf_ctxmodels.objectives.span_boundary import DataCollatorForSpanBoundaryObjective, SpanBoundary
from hf_ctxmodels.objectives.span_corruption import DataCollatorForSpanCorruption, SpanCorruption
from hf_ctxmodels.objectives.static.cooccurrence import Cooccurrence, DataCollatorForCooccurrences
from hf_ctxmodels.objectives.static.window_prediction import (
    ContinuousBagOfWords,
    DataCollatorForWindowPrediction,
    SkipGram,
)
from hf_ctxmodels.objectives.structure import DataCollatorForStructuralObjectives, MaskedLMWithStructure
from hf_ctxmodels.objectives.translation import DataCollatorForTranslation, Translation, TranslationToLanguages
from hf_ctxmodels.objectives.translation_with_lm import (
    DataCollatorForTranslationWithLanguageModels,
    TranslationWithLanguageModels,
)
from hf_ctxmodels.objectives.unified_lm import DataCollatorForUnifiedLanguageModeling, UnifiedLM
from hf_ctxmodels.objectives.unit_masking import DataCollatorForUnitMasking, UnitMaskingWithPairs
