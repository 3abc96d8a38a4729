"""Contextual-embedding systems as Hugging Face models; importing the package registers them with the Auto classes."""

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.models.albert.configuration_albert import CtxAlbertConfig
from hf_ctxmodels.models.albert.modeling_albert import (
    CtxAlbertForMaskedLM,
    CtxAlbertForMultipleChoice,
    CtxAlbertForPreTraining,
    CtxAlbertForQuestionAnswering,
    CtxAlbertForSequenceClassification,
    CtxAlbertForTokenClassification,
    CtxAlbertModel,
)
from hf_ctxmodels.models.albert.tokenization_albert import CtxAlbertTokenizer
from hf_ctxmodels.models.bert.configuration_bert import CtxBertConfig
from hf_ctxmodels.models.bert.modeling_bert import (
    CtxBertForMaskedLM,
    CtxBertForMultipleChoice,
    CtxBertForNextSentencePrediction,
    CtxBertForPreTraining,
    CtxBertForQuestionAnswering,
    CtxBertForSequenceClassification,
    CtxBertForTokenClassification,
    CtxBertModel,
)
from hf_ctxmodels.models.bert.tokenization_bert import CtxBertTokenizer
from hf_ctxmodels.models.cove.configuration_cove import CtxCoveConfig
from hf_ctxmodels.models.cove.modeling_cove import (
    CtxCoveForSequenceClassification,
    CtxCoveForTokenClassification,
    CtxCoveModel,
)
from hf_ctxmodels.models.cove.tokenization_cove import CtxCoveTokenizer
from hf_ctxmodels.models.cove.translation_cove import CtxCoveForConditionalGeneration
from hf_ctxmodels.models.cvt.configuration_cvt import CtxCvtConfig
from hf_ctxmodels.models.cvt.modeling_cvt import (
    CtxCvtForSequenceClassification,
    CtxCvtForTokenClassification,
    CtxCvtModel,
)
from hf_ctxmodels.models.cvt.tokenization_cvt import CtxCvtTokenizer
from hf_ctxmodels.models.electra.configuration_electra import CtxElectraConfig
from hf_ctxmodels.models.electra.modeling_electra import (
    CtxElectraForMaskedLM,
    CtxElectraForMultipleChoice,
    CtxElectraForQuestionAnswering,
    CtxElectraForReplacedTokenDetection,
    CtxElectraForSequenceClassification,
    CtxElectraForTokenClassification,
    CtxElectraModel,
)
from hf_ctxmodels.models.electra.pretraining_electra import CtxElectraForPreTraining
from hf_ctxmodels.models.electra.tokenization_electra import CtxElectraTokenizer
from hf_ctxmodels.models.elmo.configuration_elmo import CtxElmoConfig
from hf_ctxmodels.models.elmo.modeling_elmo import (
    CtxElmoForPreTraining,
    CtxElmoForSequenceClassification,
    CtxElmoForTokenClassification,
    CtxElmoModel,
)
from hf_ctxmodels.models.elmo.tokenization_elmo import CtxElmoTokenizer
from hf_ctxmodels.models.gensen.configuration_gensen import CtxGenSenConfig
from hf_ctxmodels.models.gensen.modeling_gensen import (
    CtxGenSenForPreTraining,
    CtxGenSenForSequenceClassification,
    CtxGenSenModel,
)
from hf_ctxmodels.models.gensen.tokenization_gensen import CtxGenSenTokenizer
from hf_ctxmodels.models.glove.configuration_glove import CtxGloveConfig
from hf_ctxmodels.models.glove.modeling_glove import (
    CtxGloveForPreTraining,
    CtxGloveForSequenceClassification,
    CtxGloveForTokenClassification,
    CtxGloveModel,
)
from hf_ctxmodels.models.glove.tokenization_glove import CtxGloveTokenizer
from hf_ctxmodels.models.infersent.configuration_infersent import CtxInferSentConfig
from hf_ctxmodels.models.infersent.modeling_infersent import (
    CtxInferSentForSequenceClassification,
    CtxInferSentModel,
)
from hf_ctxmodels.models.infersent.tokenization_infersent import CtxInferSentTokenizer
from hf_ctxmodels.models.laser.configuration_laser import CtxLaserConfig
from hf_ctxmodels.models.laser.modeling_laser import (
    CtxLaserForConditionalGeneration,
    CtxLaserForSequenceClassification,
    CtxLaserModel,
)
from hf_ctxmodels.models.laser.tokenization_laser import CtxLaserTokenizer
from hf_ctxmodels.models.lmseq2seq.configuration_lmseq2seq import CtxLmSeq2SeqConfig
from hf_ctxmodels.models.lmseq2seq.modeling_lmseq2seq import CtxLmSeq2SeqForConditionalGeneration, CtxLmSeq2SeqModel
from hf_ctxmodels.models.lmseq2seq.pretraining_lmseq2seq import CtxLmSeq2SeqForPreTraining
from hf_ctxmodels.models.lmseq2seq.tokenization_lmseq2seq import CtxLmSeq2SeqTokenizer
from hf_ctxmodels.models.roberta.configuration_roberta import CtxRobertaConfig
from hf_ctxmodels.models.roberta.modeling_roberta import (
    CtxRobertaForMaskedLM,
    CtxRobertaForMultipleChoice,
    CtxRobertaForQuestionAnswering,
    CtxRobertaForSequenceClassification,
    CtxRobertaForTokenClassification,
    CtxRobertaModel,
)
from hf_ctxmodels.models.roberta.tokenization_roberta import CtxRobertaTokenizer
from hf_ctxmodels.models.seqae.configuration_seqae import CtxSeqaeConfig
from hf_ctxmodels.models.seqae.modeling_seqae import (
    CtxSeqaeForCausalLM,
    CtxSeqaeForSequenceClassification,
    CtxSeqaeForTokenClassification,
    CtxSeqaeModel,
)
from hf_ctxmodels.models.seqae.tokenization_seqae import CtxSeqaeTokenizer
from hf_ctxmodels.models.ulmfit.configuration_ulmfit import CtxUlmfitConfig
from hf_ctxmodels.models.ulmfit.modeling_ulmfit import (
    CtxUlmfitForCausalLM,
    CtxUlmfitForSequenceClassification,
    CtxUlmfitForTokenClassification,
    CtxUlmfitModel,
)
from hf_ctxmodels.models.ulmfit.tokenization_ulmfit import CtxUlmfitTokenizer
from hf_ctxmodels.models.word2vec.configuration_word2vec import CtxWord2VecConfig
from hf_ctxmodels.models.word2vec.modeling_word2vec import (
    CtxWord2VecForPreTraining,
    CtxWord2VecForSequenceClassification,
    CtxWord2VecForTokenClassification,
    CtxWord2VecModel,
)
from hf_ctxmodels.models.word2vec.tokenization_word2vec import CtxWord2VecTokenizer
from hf_ctxmodels.models.xlm_roberta.configuration_xlm_roberta import CtxXLMRobertaConfig
from hf_ctxmodels.models.xlm_roberta.modeling_xlm_roberta import (
    CtxXLMRobertaForMaskedLM,
    CtxXLMRobertaForMultipleChoice,
    CtxXLMRobertaForQuestionAnswering,
    CtxXLMRobertaForSequenceClassification,
    CtxXLMRobertaForTokenClassification,
    CtxXLMRobertaModel,
)
from hf_ctxmodels.models.xlm_roberta.tokenization_xlm_roberta import CtxXLMRobertaTokenizer
from hf_ctxmodels.models.xlnet.configuration_xlnet import CtxXLNetConfig
from hf_ctxmodels.models.xlnet.modeling_xlnet import (
    CtxXLNetForMultipleChoice,
    CtxXLNetForPreTraining,
    CtxXLNetForQuestionAnswering,
    CtxXLNetForQuestionAnsweringSimple,
    CtxXLNetForSequenceClassification,
    CtxXLNetForTokenClassification,
    CtxXLNetModel,
)
from hf_ctxmodels.models.xlnet.tokenization_xlnet import CtxXLNetTokenizer
from hf_ctxmodels.objectives import (
    DataCollatorForCooccurrences,
    DataCollatorForMaskedLanguageModeling,
    DataCollatorForNextSentencePrediction,
    DataCollatorForPermutationLanguageModeling,
    DataCollatorForReplacedTokenDetection,
    DataCollatorForSentenceOrderPrediction,
    DataCollatorForWindowPrediction,
)
from hf_ctxmodels.registry import FAMILIES, get_family, register

__version__ = "0.1.0"

__all__ = [
    "FAMILIES",
    "CtxAlbertConfig",
    "CtxAlbertForMaskedLM",
    "CtxAlbertForMultipleChoice",
    "CtxAlbertForPreTraining",
    "CtxAlbertForQuestionAnswering",
    "CtxAlbertForSequenceClassification",
    "CtxAlbertForTokenClassification",
    "CtxAlbertModel",
    "CtxAlbertTokenizer",
    "CtxBertConfig",
    "CtxBertForMaskedLM",
    "CtxBertForMultipleChoice",
    "CtxBertForNextSentencePrediction",
    "CtxBertForPreTraining",
    "CtxBertForQuestionAnswering",
    "CtxBertForSequenceClassification",
    "CtxBertForTokenClassification",
    "CtxBertModel",
    "CtxBertTokenizer",
    "CtxCoveConfig",
    "CtxCoveForConditionalGeneration",
    "CtxCoveForSequenceClassification",
    "CtxCoveForTokenClassification",
    "CtxCoveModel",
    "CtxCoveTokenizer",
    "CtxCvtConfig",
    "CtxCvtForSequenceClassification",
    "CtxCvtForTokenClassification",
    "CtxCvtModel",
    "CtxCvtTokenizer",
    "CtxElectraConfig",
    "CtxElectraForMaskedLM",
    "CtxElectraForMultipleChoice",
    "CtxElectraForPreTraining",
    "CtxElectraForQuestionAnswering",
    "CtxElectraForReplacedTokenDetection",
    "CtxElectraForSequenceClassification",
    "CtxElectraForTokenClassification",
    "CtxElectraModel",
    "CtxElectraTokenizer",
    "CtxElmoConfig",
    "CtxElmoForPreTraining",
    "CtxElmoForSequenceClassification",
    "CtxElmoForTokenClassification",
    "CtxElmoModel",
    "CtxElmoTokenizer",
    "CtxError",
    "CtxGenSenConfig",
    "CtxGenSenForPreTraining",
    "CtxGenSenForSequenceClassification",
    "CtxGenSenModel",
    "CtxGenSenTokenizer",
    "CtxGloveConfig",
    "CtxGloveForPreTraining",
    "CtxGloveForSequenceClassification",
    "CtxGloveForTokenClassification",
    "CtxGloveModel",
    "CtxGloveTokenizer",
    "CtxInferSentConfig",
    "CtxInferSentForSequenceClassification",
    "CtxInferSentModel",
    "CtxInferSentTokenizer",
    "CtxLaserConfig",
    "CtxLaserForConditionalGeneration",
    "CtxLaserForSequenceClassification",
    "CtxLaserModel",
    "CtxLaserTokenizer",
    "CtxLmSeq2SeqConfig",
    "CtxLmSeq2SeqForConditionalGeneration",
    "CtxLmSeq2SeqForPreTraining",
    "CtxLmSeq2SeqModel",
    "CtxLmSeq2SeqTokenizer",
    "CtxRobertaConfig",
    "CtxRobertaForMaskedLM",
    "CtxRobertaForMultipleChoice",
    "CtxRobertaForQuestionAnswering",
    "CtxRobertaForSequenceClassification",
    "CtxRobertaForTokenClassification",
    "CtxRobertaModel",
    "CtxRobertaTokenizer",
    "CtxSeqaeConfig",
    "CtxSeqaeForCausalLM",
    "CtxSeqaeForSequenceClassification",
    "CtxSeqaeForTokenClassification",
    "CtxSeqaeModel",
    "CtxSeqaeTokenizer",
    "CtxUlmfitConfig",
    "CtxUlmfitForCausalLM",
    "CtxUlmfitForSequenceClassification",
    "CtxUlmfitForTokenClassification",
    "CtxUlmfitModel",
    "CtxUlmfitTokenizer",
    "CtxWord2VecConfig",
    "CtxWord2VecForPreTraining",
    "CtxWord2VecForSequenceClassification",
    "CtxWord2VecForTokenClassification",
    "CtxWord2VecModel",
    "CtxWord2VecTokenizer",
    "CtxXLMRobertaConfig",
    "CtxXLMRobertaForMaskedLM",
    "CtxXLMRobertaForMultipleChoice",
    "CtxXLMRobertaForQuestionAnswering",
    "CtxXLMRobertaForSequenceClassification",
    "CtxXLMRobertaForTokenClassification",
    "CtxXLMRobertaModel",
    "CtxXLMRobertaTokenizer",
    "CtxXLNetConfig",
    "CtxXLNetForMultipleChoice",
    "CtxXLNetForPreTraining",
    "CtxXLNetForQuestionAnswering",
    "CtxXLNetForQuestionAnsweringSimple",
    "CtxXLNetForSequenceClassification",
    "CtxXLNetForTokenClassification",
    "CtxXLNetModel",
    "CtxXLNetTokenizer",
    "DataCollatorForCooccurrences",
    "DataCollatorForMaskedLanguageModeling",
    "DataCollatorForNextSentencePrediction",
    "DataCollatorForPermutationLanguageModeling",
    "DataCollatorForReplacedTokenDetection",
    "DataCollatorForSentenceOrderPrediction",
    "DataCollatorForWindowPrediction",
    "get_family",
]

register()
