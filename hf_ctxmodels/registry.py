"""The one table of the zoo: what each family is made of. Registration and the test matrix both read it."""

from dataclasses import dataclass, field
from typing import Any

import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightTransform

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.models.albert import modeling_albert as albert
from hf_ctxmodels.models.albert.configuration_albert import CtxAlbertConfig
from hf_ctxmodels.models.albert.conversion_albert import ALBERT_CONVERSION
from hf_ctxmodels.models.albert.tokenization_albert import CtxAlbertTokenizer
from hf_ctxmodels.models.bert import modeling_bert as bert
from hf_ctxmodels.models.bert.configuration_bert import CtxBertConfig
from hf_ctxmodels.models.bert.conversion_bert import BERT_CONVERSION
from hf_ctxmodels.models.bert.tokenization_bert import CtxBertTokenizer
from hf_ctxmodels.models.cove import modeling_cove as cove
from hf_ctxmodels.models.cove.configuration_cove import CtxCoveConfig
from hf_ctxmodels.models.cove.tokenization_cove import CtxCoveTokenizer
from hf_ctxmodels.models.cove.translation_cove import CtxCoveForConditionalGeneration
from hf_ctxmodels.models.cvt import modeling_cvt as cvt
from hf_ctxmodels.models.cvt.configuration_cvt import CtxCvtConfig
from hf_ctxmodels.models.cvt.tokenization_cvt import CtxCvtTokenizer
from hf_ctxmodels.models.electra import modeling_electra as electra
from hf_ctxmodels.models.electra.configuration_electra import CtxElectraConfig
from hf_ctxmodels.models.electra.conversion_electra import ELECTRA_CONVERSION
from hf_ctxmodels.models.electra.pretraining_electra import CtxElectraForPreTraining
from hf_ctxmodels.models.electra.tokenization_electra import CtxElectraTokenizer
from hf_ctxmodels.models.elmo import modeling_elmo as elmo
from hf_ctxmodels.models.elmo.configuration_elmo import CtxElmoConfig
from hf_ctxmodels.models.elmo.tokenization_elmo import CtxElmoTokenizer
from hf_ctxmodels.models.gensen import modeling_gensen as gensen
from hf_ctxmodels.models.gensen.configuration_gensen import CtxGenSenConfig
from hf_ctxmodels.models.gensen.tokenization_gensen import CtxGenSenTokenizer
from hf_ctxmodels.models.glove import modeling_glove as glove
from hf_ctxmodels.models.glove.configuration_glove import CtxGloveConfig
from hf_ctxmodels.models.glove.tokenization_glove import CtxGloveTokenizer
from hf_ctxmodels.models.infersent import modeling_infersent as infersent
from hf_ctxmodels.models.infersent.configuration_infersent import CtxInferSentConfig
from hf_ctxmodels.models.infersent.tokenization_infersent import CtxInferSentTokenizer
from hf_ctxmodels.models.laser import modeling_laser as laser
from hf_ctxmodels.models.laser.configuration_laser import CtxLaserConfig
from hf_ctxmodels.models.laser.tokenization_laser import CtxLaserTokenizer
from hf_ctxmodels.models.lmseq2seq import modeling_lmseq2seq as lmseq2seq
from hf_ctxmodels.models.lmseq2seq.configuration_lmseq2seq import CtxLmSeq2SeqConfig
from hf_ctxmodels.models.lmseq2seq.pretraining_lmseq2seq import CtxLmSeq2SeqForPreTraining
from hf_ctxmodels.models.lmseq2seq.tokenization_lmseq2seq import CtxLmSeq2SeqTokenizer
from hf_ctxmodels.models.roberta import modeling_roberta as roberta
from hf_ctxmodels.models.roberta.configuration_roberta import CtxRobertaConfig
from hf_ctxmodels.models.roberta.conversion_roberta import ROBERTA_CONVERSION
from hf_ctxmodels.models.roberta.tokenization_roberta import CtxRobertaTokenizer
from hf_ctxmodels.models.seqae import modeling_seqae as seqae
from hf_ctxmodels.models.seqae.configuration_seqae import CtxSeqaeConfig
from hf_ctxmodels.models.seqae.tokenization_seqae import CtxSeqaeTokenizer
from hf_ctxmodels.models.ulmfit import modeling_ulmfit as ulmfit
from hf_ctxmodels.models.ulmfit.configuration_ulmfit import CtxUlmfitConfig
from hf_ctxmodels.models.ulmfit.tokenization_ulmfit import CtxUlmfitTokenizer
from hf_ctxmodels.models.word2vec import modeling_word2vec as word2vec
from hf_ctxmodels.models.word2vec.configuration_word2vec import CtxWord2VecConfig
from hf_ctxmodels.models.word2vec.tokenization_word2vec import CtxWord2VecTokenizer
from hf_ctxmodels.models.xlm_roberta import modeling_xlm_roberta as xlm_roberta
from hf_ctxmodels.models.xlm_roberta.configuration_xlm_roberta import CtxXLMRobertaConfig
from hf_ctxmodels.models.xlm_roberta.tokenization_xlm_roberta import CtxXLMRobertaTokenizer
from hf_ctxmodels.models.xlnet import modeling_xlnet as xlnet
from hf_ctxmodels.models.xlnet.configuration_xlnet import CtxXLNetConfig
from hf_ctxmodels.models.xlnet.conversion_xlnet import XLNET_CONVERSION
from hf_ctxmodels.models.xlnet.tokenization_xlnet import CtxXLNetTokenizer
from hf_ctxmodels.objectives import (
    BidirectionalLM,
    CausalLM,
    ContinuousBagOfWords,
    Cooccurrence,
    FullSentences,
    MaskedLM,
    MaskedLMWithNextSentence,
    MaskedLMWithSentenceOrder,
    Objective,
    PermutationLM,
    ReplacedTokenDetection,
    SentenceTasks,
    SequenceAutoencoding,
    SkipGram,
    Translation,
    TranslationToLanguages,
    TranslationWithLanguageModels,
)


@dataclass(frozen=True)
class Family:
    """One row of the zoo.

    Attributes:
        name: What scripts call it.
        paper: Where it was published.
        config: Its configuration class; `config.model_type` is what checkpoints carry.
        tokenizer: Its tokenizer class.
        models: Auto class name -> model class.
        objectives: Name -> objective; the first is the family's own.
        sizes: Name -> configuration fields.
        conversion: Weight names and shapes, reference layout -> native layout.
        peers: Where the class that `models` has for an Auto class has no peer in transformers, because the class there
            is another one's: Auto class name -> that other one, which no Auto class opens.
    """

    name: str
    paper: str
    config: type[PreTrainedConfig]
    tokenizer: type[PreTrainedTokenizerBase]
    models: dict[str, type[CtxPreTrainedModel]]
    objectives: dict[str, type[Objective]]
    sizes: dict[str, dict[str, Any]]
    conversion: list[WeightTransform]
    peers: dict[str, type[CtxPreTrainedModel]] = field(default_factory=dict)

    @property
    def reference(self) -> str | None:
        """`model_type` of the peer in transformers, loaded from and exported to; None where there is none."""
        return self.models["AutoModel"].reference_model_type


def _encoder_size(width: int, layers: int, heads: int) -> dict[str, int]:
    """Shape of a Transformer whose feed-forward layer is four times as wide as its residual stream."""
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }


# The widths of released vectors (GloVe: 50, 100, 200, 300; word2vec: 300), and smaller ones for tests.
_WORD_VECTOR_SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 50},
    "small": {"hidden_size": 100},
    "base": {"hidden_size": 300},
}


def _albert_size(width: int, layers: int, heads: int, *, embedding: int = 128, dropout: float = 0.0) -> dict[str, Any]:
    """Shape and regularisation of an ALBERT."""
    return {
        **_encoder_size(width, layers, heads),
        "embedding_size": embedding,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }


def _recurrent_size(cell: int, projection: int, highways: int) -> dict[str, Any]:
    """Shape of an LSTM of two directions, whose outputs are projected, over characters."""
    return {"hidden_size": 2 * projection, "cell_size": cell, "num_highway_layers": highways}


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in [
        Family(
            name="bert",
            paper="Devlin et al. 2019, BERT: Pre-training of Deep Bidirectional Transformers (arXiv 1810.04805)",
            config=CtxBertConfig,
            tokenizer=CtxBertTokenizer,
            models={
                "AutoModel": bert.CtxBertModel,
                "AutoModelForPreTraining": bert.CtxBertForPreTraining,
                "AutoModelForMaskedLM": bert.CtxBertForMaskedLM,
                "AutoModelForNextSentencePrediction": bert.CtxBertForNextSentencePrediction,
                "AutoModelForSequenceClassification": bert.CtxBertForSequenceClassification,
                "AutoModelForTokenClassification": bert.CtxBertForTokenClassification,
                "AutoModelForQuestionAnswering": bert.CtxBertForQuestionAnswering,
                "AutoModelForMultipleChoice": bert.CtxBertForMultipleChoice,
            },
            objectives={"mlm+nsp": MaskedLMWithNextSentence, "mlm": MaskedLM},
            # tiny to small: Turc et al. 2019 (arXiv 1908.08962), table 1; base, large: Devlin et al. 2019, section 3
            sizes={
                "tiny": _encoder_size(128, 2, 2),
                "mini": _encoder_size(256, 4, 4),
                "small": _encoder_size(512, 4, 8),
                "base": _encoder_size(768, 12, 12),
                "large": _encoder_size(1024, 24, 16),
            },
            conversion=BERT_CONVERSION,
        ),
        Family(
            name="roberta",
            paper="Liu et al. 2019, RoBERTa: A Robustly Optimized BERT Pretraining Approach (arXiv 1907.11692)",
            config=CtxRobertaConfig,
            tokenizer=CtxRobertaTokenizer,
            models={
                "AutoModel": roberta.CtxRobertaModel,
                "AutoModelForMaskedLM": roberta.CtxRobertaForMaskedLM,
                "AutoModelForSequenceClassification": roberta.CtxRobertaForSequenceClassification,
                "AutoModelForTokenClassification": roberta.CtxRobertaForTokenClassification,
                "AutoModelForQuestionAnswering": roberta.CtxRobertaForQuestionAnswering,
                "AutoModelForMultipleChoice": roberta.CtxRobertaForMultipleChoice,
            },
            objectives={"full-sentences": FullSentences, "mlm": MaskedLM},
            sizes={
                "tiny": _encoder_size(128, 2, 2),
                "mini": _encoder_size(256, 4, 4),
                "small": _encoder_size(512, 4, 8),
                "base": _encoder_size(768, 12, 12),
                "large": _encoder_size(1024, 24, 16),
            },
            conversion=ROBERTA_CONVERSION,
        ),
        Family(
            name="xlm_roberta",
            paper="Conneau et al. 2020, Unsupervised Cross-lingual Representation Learning at Scale (arXiv 1911.02116)",
            config=CtxXLMRobertaConfig,
            tokenizer=CtxXLMRobertaTokenizer,
            models={
                "AutoModel": xlm_roberta.CtxXLMRobertaModel,
                "AutoModelForMaskedLM": xlm_roberta.CtxXLMRobertaForMaskedLM,
                "AutoModelForSequenceClassification": xlm_roberta.CtxXLMRobertaForSequenceClassification,
                "AutoModelForTokenClassification": xlm_roberta.CtxXLMRobertaForTokenClassification,
                "AutoModelForQuestionAnswering": xlm_roberta.CtxXLMRobertaForQuestionAnswering,
                "AutoModelForMultipleChoice": xlm_roberta.CtxXLMRobertaForMultipleChoice,
            },
            objectives={"full-sentences": FullSentences, "mlm": MaskedLM},
            sizes={
                "tiny": _encoder_size(128, 2, 2),
                "mini": _encoder_size(256, 4, 4),
                "small": _encoder_size(512, 4, 8),
                "base": _encoder_size(768, 12, 12),
                "large": _encoder_size(1024, 24, 16),
            },
            conversion=ROBERTA_CONVERSION,
        ),
        Family(
            name="albert",
            paper="Lan et al. 2019, ALBERT: A Lite BERT for Self-supervised Learning (arXiv 1909.11942)",
            config=CtxAlbertConfig,
            tokenizer=CtxAlbertTokenizer,
            models={
                "AutoModel": albert.CtxAlbertModel,
                "AutoModelForPreTraining": albert.CtxAlbertForPreTraining,
                "AutoModelForMaskedLM": albert.CtxAlbertForMaskedLM,
                "AutoModelForSequenceClassification": albert.CtxAlbertForSequenceClassification,
                "AutoModelForTokenClassification": albert.CtxAlbertForTokenClassification,
                "AutoModelForQuestionAnswering": albert.CtxAlbertForQuestionAnswering,
                "AutoModelForMultipleChoice": albert.CtxAlbertForMultipleChoice,
            },
            objectives={"mlm+sop": MaskedLMWithSentenceOrder, "mlm": MaskedLM},
            # base to xxlarge: Lan et al. 2019, table 1, in the two releases, of which the second (the plain name) has
            # no dropout; tiny to small: for a CPU (tiny with embeddings of 32 hardly learns)
            sizes={
                "tiny": _albert_size(128, 2, 2),
                "mini": _albert_size(256, 4, 4, embedding=64),
                "small": _albert_size(512, 6, 8),
                "base": _albert_size(768, 12, 12),
                "large": _albert_size(1024, 24, 16),
                "xlarge": _albert_size(2048, 24, 16),
                "xxlarge": _albert_size(4096, 12, 64),
                "base-v1": _albert_size(768, 12, 12, dropout=0.1),
                "large-v1": _albert_size(1024, 24, 16, dropout=0.1),
                "xlarge-v1": _albert_size(2048, 24, 16, dropout=0.1),
                "xxlarge-v1": _albert_size(4096, 12, 64),
            },
            conversion=ALBERT_CONVERSION,
        ),
        Family(
            name="electra",
            paper="Clark et al. 2020, ELECTRA: Pre-training Text Encoders as Discriminators Rather Than Generators "
            "(arXiv 2003.10555)",
            config=CtxElectraConfig,
            tokenizer=CtxElectraTokenizer,
            models={
                "AutoModel": electra.CtxElectraModel,
                "AutoModelForPreTraining": CtxElectraForPreTraining,
                "AutoModelForMaskedLM": electra.CtxElectraForMaskedLM,
                "AutoModelForSequenceClassification": electra.CtxElectraForSequenceClassification,
                "AutoModelForTokenClassification": electra.CtxElectraForTokenClassification,
                "AutoModelForQuestionAnswering": electra.CtxElectraForQuestionAnswering,
                "AutoModelForMultipleChoice": electra.CtxElectraForMultipleChoice,
            },
            objectives={"rtd": ReplacedTokenDetection, "mlm": MaskedLM},
            # small, base, large: Clark et al. 2020, appendix A, table 6; the others have its small one's proportions
            sizes={
                "tiny": {**_encoder_size(128, 2, 2), "embedding_size": 64, "generator_size": 0.5},
                "mini": {**_encoder_size(256, 4, 4), "embedding_size": 128, "generator_size": 0.25},
                "small": {**_encoder_size(256, 12, 4), "embedding_size": 128, "generator_size": 0.25},
                "base": {**_encoder_size(768, 12, 12), "embedding_size": 768, "generator_size": 1 / 3},
                "large": {**_encoder_size(1024, 24, 16), "embedding_size": 1024, "generator_size": 0.25},
            },
            conversion=ELECTRA_CONVERSION,
            peers={"AutoModelForPreTraining": electra.CtxElectraForReplacedTokenDetection},
        ),
        Family(
            name="xlnet",
            paper="Yang et al. 2019, XLNet: Generalized Autoregressive Pretraining for Language Understanding "
            "(arXiv 1906.08237)",
            config=CtxXLNetConfig,
            tokenizer=CtxXLNetTokenizer,
            models={
                "AutoModel": xlnet.CtxXLNetModel,
                "AutoModelForPreTraining": xlnet.CtxXLNetForPreTraining,
                "AutoModelForCausalLM": xlnet.CtxXLNetForPreTraining,
                "AutoModelForSequenceClassification": xlnet.CtxXLNetForSequenceClassification,
                "AutoModelForTokenClassification": xlnet.CtxXLNetForTokenClassification,
                "AutoModelForQuestionAnswering": xlnet.CtxXLNetForQuestionAnsweringSimple,
                "AutoModelForMultipleChoice": xlnet.CtxXLNetForMultipleChoice,
            },
            objectives={"plm": PermutationLM},
            # base, large: the released models (appendix A.4); the small ones are BERT's of Turc et al. 2019
            sizes={
                "tiny": _encoder_size(128, 2, 2),
                "mini": _encoder_size(256, 4, 4),
                "small": _encoder_size(512, 4, 8),
                "base": _encoder_size(768, 12, 12),
                "large": _encoder_size(1024, 24, 16),
            },
            conversion=XLNET_CONVERSION,
        ),
        Family(
            name="word2vec",
            paper="Mikolov et al. 2013, Distributed Representations of Words and Phrases and their Compositionality "
            "(arXiv 1310.4546); Efficient Estimation of Word Representations in Vector Space (arXiv 1301.3781)",
            config=CtxWord2VecConfig,
            tokenizer=CtxWord2VecTokenizer,
            models={
                "AutoModel": word2vec.CtxWord2VecModel,
                "AutoModelForPreTraining": word2vec.CtxWord2VecForPreTraining,
                "AutoModelForSequenceClassification": word2vec.CtxWord2VecForSequenceClassification,
                "AutoModelForTokenClassification": word2vec.CtxWord2VecForTokenClassification,
            },
            objectives={"skip-gram": SkipGram, "cbow": ContinuousBagOfWords},
            sizes=_WORD_VECTOR_SIZES,
            conversion=[],
        ),
        Family(
            name="glove",
            paper="Pennington, Socher, Manning 2014, GloVe: Global Vectors for Word Representation (EMNLP)",
            config=CtxGloveConfig,
            tokenizer=CtxGloveTokenizer,
            models={
                "AutoModel": glove.CtxGloveModel,
                "AutoModelForPreTraining": glove.CtxGloveForPreTraining,
                "AutoModelForSequenceClassification": glove.CtxGloveForSequenceClassification,
                "AutoModelForTokenClassification": glove.CtxGloveForTokenClassification,
            },
            objectives={"cooccurrence": Cooccurrence},
            sizes=_WORD_VECTOR_SIZES,
            conversion=[],
        ),
        Family(
            name="elmo",
            paper="Peters et al. 2018, Deep Contextualized Word Representations (arXiv 1802.05365)",
            config=CtxElmoConfig,
            tokenizer=CtxElmoTokenizer,
            models={
                "AutoModel": elmo.CtxElmoModel,
                "AutoModelForPreTraining": elmo.CtxElmoForPreTraining,
                "AutoModelForSequenceClassification": elmo.CtxElmoForSequenceClassification,
                "AutoModelForTokenClassification": elmo.CtxElmoForTokenClassification,
            },
            objectives={"bilm": BidirectionalLM},
            # small, medium, base (the original): the released models; tiny: for a CPU
            sizes={
                "tiny": {
                    **_recurrent_size(256, 128, 1),
                    "filters": [[1, 16], [2, 32], [3, 64], [4, 64], [5, 80]],
                },
                "small": _recurrent_size(1024, 128, 1),
                "medium": _recurrent_size(2048, 256, 1),
                "base": _recurrent_size(4096, 512, 2),
            },
            conversion=[],
        ),
        Family(
            name="cvt",
            paper="Clark et al. 2018, Semi-Supervised Sequence Modeling with Cross-View Training (arXiv 1809.08370)",
            config=CtxCvtConfig,
            tokenizer=CtxCvtTokenizer,
            models={
                "AutoModel": cvt.CtxCvtModel,
                "AutoModelForSequenceClassification": cvt.CtxCvtForSequenceClassification,
                "AutoModelForTokenClassification": cvt.CtxCvtForTokenClassification,
            },
            objectives={},
            # base: the paper's; tiny and small: for a CPU
            sizes={
                "tiny": {
                    "hidden_size": 128,
                    "cell_size": 128,
                    "prediction_size": 64,
                    "character_embedding_size": 16,
                    "filters": [[2, 32], [3, 32], [4, 32]],
                },
                "small": {"hidden_size": 256, "cell_size": 256, "prediction_size": 128, "character_embedding_size": 25},
                "base": {},
            },
            conversion=[],
        ),
        Family(
            name="ulmfit",
            paper="Howard & Ruder 2018, Universal Language Model Fine-tuning for Text Classification "
            "(arXiv 1801.06146)",
            config=CtxUlmfitConfig,
            tokenizer=CtxUlmfitTokenizer,
            models={
                "AutoModel": ulmfit.CtxUlmfitModel,
                "AutoModelForPreTraining": ulmfit.CtxUlmfitForCausalLM,
                "AutoModelForCausalLM": ulmfit.CtxUlmfitForCausalLM,
                "AutoModelForSequenceClassification": ulmfit.CtxUlmfitForSequenceClassification,
                "AutoModelForTokenClassification": ulmfit.CtxUlmfitForTokenClassification,
            },
            objectives={"clm": CausalLM},
            # base: the paper's; the others have its proportions, for a CPU
            sizes={
                "tiny": {"hidden_size": 128, "cell_size": 256, "num_hidden_layers": 2},
                "small": {"hidden_size": 200, "cell_size": 400, "num_hidden_layers": 3},
                "base": {"hidden_size": 400, "cell_size": 1150, "num_hidden_layers": 3},
            },
            conversion=[],
        ),
        Family(
            name="seqae",
            paper="Dai & Le 2015, Semi-supervised Sequence Learning (arXiv 1511.01432)",
            config=CtxSeqaeConfig,
            tokenizer=CtxSeqaeTokenizer,
            models={
                "AutoModel": seqae.CtxSeqaeModel,
                "AutoModelForPreTraining": seqae.CtxSeqaeForCausalLM,
                "AutoModelForCausalLM": seqae.CtxSeqaeForCausalLM,
                "AutoModelForSequenceClassification": seqae.CtxSeqaeForSequenceClassification,
                "AutoModelForTokenClassification": seqae.CtxSeqaeForTokenClassification,
            },
            objectives={"sae": SequenceAutoencoding, "clm": CausalLM},
            # base: the paper's (section 4); the others have its proportions, for a CPU
            sizes={
                "tiny": {"embedding_size": 128, "hidden_size": 256},
                "small": {"embedding_size": 256, "hidden_size": 512},
                "base": {"embedding_size": 512, "hidden_size": 1024},
            },
            conversion=[],
        ),
        Family(
            name="cove",
            paper="McCann et al. 2017, Learned in Translation: Contextualized Word Vectors (arXiv 1708.00107)",
            config=CtxCoveConfig,
            tokenizer=CtxCoveTokenizer,
            models={
                "AutoModel": cove.CtxCoveModel,
                "AutoModelForPreTraining": CtxCoveForConditionalGeneration,
                "AutoModelForSeq2SeqLM": CtxCoveForConditionalGeneration,
                "AutoModelForSequenceClassification": cove.CtxCoveForSequenceClassification,
                "AutoModelForTokenClassification": cove.CtxCoveForTokenClassification,
            },
            objectives={"translation": Translation},
            # base: the released encoder (section 6); tiny: for a CPU
            sizes={
                "tiny": {"embedding_size": 100, "hidden_size": 128, "biattention_size": 64},
                "base": {"embedding_size": 300, "hidden_size": 600},
            },
            conversion=[],
        ),
        Family(
            name="infersent",
            paper="Conneau et al. 2017, Supervised Learning of Universal Sentence Representations from Natural "
            "Language Inference Data (arXiv 1705.02364)",
            config=CtxInferSentConfig,
            tokenizer=CtxInferSentTokenizer,
            models={
                "AutoModel": infersent.CtxInferSentModel,
                "AutoModelForSequenceClassification": infersent.CtxInferSentForSequenceClassification,
            },
            objectives={},
            # base: the paper's; the others for a CPU
            sizes={
                "tiny": {"embedding_size": 100, "hidden_size": 512, "classifier_size": 128},
                "small": {"embedding_size": 300, "hidden_size": 1024},
                "base": {"embedding_size": 300, "hidden_size": 4096},
            },
            conversion=[],
        ),
        Family(
            name="laser",
            paper="Artetxe & Schwenk 2019, Massively Multilingual Sentence Embeddings for Zero-Shot Cross-Lingual "
            "Transfer and Beyond (arXiv 1812.10464)",
            config=CtxLaserConfig,
            tokenizer=CtxLaserTokenizer,
            models={
                "AutoModel": laser.CtxLaserModel,
                "AutoModelForPreTraining": laser.CtxLaserForConditionalGeneration,
                "AutoModelForSeq2SeqLM": laser.CtxLaserForConditionalGeneration,
                "AutoModelForSequenceClassification": laser.CtxLaserForSequenceClassification,
            },
            objectives={"translation": TranslationToLanguages},
            # base: the paper's; the others for a CPU
            sizes={
                "tiny": {
                    "embedding_size": 64,
                    "hidden_size": 256,
                    "num_hidden_layers": 1,
                    "language_size": 16,
                    "decoder_size": 192,
                },
                "small": {"embedding_size": 160, "hidden_size": 512, "num_hidden_layers": 3, "decoder_size": 512},
                "base": {},
            },
            conversion=[],
        ),
        Family(
            name="gensen",
            paper="Subramanian et al. 2018, Learning General Purpose Distributed Sentence Representations via Large "
            "Scale Multi-task Learning (arXiv 1804.00079)",
            config=CtxGenSenConfig,
            tokenizer=CtxGenSenTokenizer,
            models={
                "AutoModel": gensen.CtxGenSenModel,
                "AutoModelForPreTraining": gensen.CtxGenSenForPreTraining,
                "AutoModelForSequenceClassification": gensen.CtxGenSenForSequenceClassification,
            },
            objectives={"sentence-tasks": SentenceTasks},
            # base: the paper's larger one; the others for a CPU
            sizes={
                "tiny": {"embedding_size": 96, "hidden_size": 192, "classifier_size": 128},
                "small": {"embedding_size": 256, "hidden_size": 1024},
                "base": {},
            },
            conversion=[],
        ),
        Family(
            name="lmseq2seq",
            paper="Ramachandran et al. 2016, Unsupervised Pretraining for Sequence to Sequence Learning "
            "(arXiv 1611.02683)",
            config=CtxLmSeq2SeqConfig,
            tokenizer=CtxLmSeq2SeqTokenizer,
            models={
                "AutoModel": lmseq2seq.CtxLmSeq2SeqModel,
                "AutoModelForPreTraining": CtxLmSeq2SeqForPreTraining,
                "AutoModelForSeq2SeqLM": lmseq2seq.CtxLmSeq2SeqForConditionalGeneration,
            },
            objectives={"translation+lm": TranslationWithLanguageModels, "translation": Translation},
            # the widths of the language models of the family seqae, whose sizes these are; layers as in the paper
            sizes={
                "tiny": {"embedding_size": 128, "hidden_size": 256, "num_hidden_layers": 2},
                "small": {"embedding_size": 256, "hidden_size": 512, "num_hidden_layers": 3},
                "base": {"embedding_size": 512, "hidden_size": 1024, "num_hidden_layers": 3},
            },
            conversion=[],
        ),
    ]
}


def get_family(key: str | PreTrainedConfig | PreTrainedModel) -> Family:
    """Look a family up by its name, its `model_type`, a configuration or a model.

    A configuration or model of the reference implementation belongs to no family, even where its `model_type` is a
    family's name: it has to be opened with the family's classes first.

    Raises:
        CtxError: No such family; the message lists those there are.
    """
    if isinstance(key, PreTrainedModel):
        key = key.config
    for family in FAMILIES.values():
        if type(key) is family.config or key in (family.name, family.config.model_type):
            return family
    if isinstance(key, PreTrainedConfig):
        raise CtxError(
            f"{type(key).__name__} (model_type {key.model_type!r}) is no configuration of this package.",
            location=key.name_or_path or None,
            hint=f"open the model with a class of one of its families: {', '.join(FAMILIES)}.",
        )
    raise CtxError(f"There is no family {key!r} in this zoo.", hint=f"use one of: {', '.join(FAMILIES)}.")


def register() -> None:
    """Register every family with the Auto classes of transformers. Calling it again changes nothing.

    Raises:
        RuntimeError: Somebody else has registered a family's `model_type` already.
    """
    for family in FAMILIES.values():
        model_type = family.config.model_type
        known = transformers.models.auto.configuration_auto.CONFIG_MAPPING._extra_content.get(model_type)
        if known is family.config:
            continue
        if known is not None or get_checkpoint_conversion_mapping(model_type) is not None:
            owner = "somebody" if known is None else f"{known.__module__}.{known.__qualname__}"
            raise RuntimeError(
                f"model_type {model_type!r} is registered already, by {owner}; hf_ctxmodels cannot register its own. "
                f"Import only one of the two packages, or the other after renaming its model_type."
            )
        register_checkpoint_conversion_mapping(model_type, family.conversion)
        AutoConfig.register(model_type, family.config)
        AutoTokenizer.register(family.config, tokenizer_class=family.tokenizer)
        for auto_name, model_class in family.models.items():
            getattr(transformers, auto_name).register(family.config, model_class)
