"""Architectures that several families share: base models, configurations and architecture-specific heads.

- `TransformerEncoder`, `TransformerDecoder` and `EncoderDecoder` are the base models of the Transformer families.
- `QueryForConditionalGeneration` generates with an encoder and query tokens.
- `LSTMLanguageModel` and `LSTMForCausalLM` are recurrent language models.
- `StaticEmbeddingModel` looks up static word vectors; `PretrainedEmbeddingEncoder` encodes them in context.
- `CharacterModel` encodes the characters of words.
- `RecurrentSentenceEncoder` encodes sentences; `encode_sentences` embeds sentences with any base model.

A family derives its classes from these, and defines its layers, defaults and conversion of weights.
"""

from hf_ctxmodels.architectures.character_models import CharacterModel, CharacterPreTrainedModel
from hf_ctxmodels.architectures.configurations import (
    CtxCharacterConfig,
    CtxDecoderConfig,
    CtxEncoderConfig,
    CtxLSTMLanguageModelConfig,
    CtxQueryGenerationConfig,
    CtxSeq2SeqConfig,
    CtxStaticConfig,
)
from hf_ctxmodels.architectures.encoder_decoder import EncoderDecoder, EncoderDecoderOutput, TransformerStack
from hf_ctxmodels.architectures.encoder_decoder_heads import (
    EncoderDecoderHeadModel,
    TransformerForConditionalGeneration,
)
from hf_ctxmodels.architectures.lstm_language_model import (
    LSTMForCausalLM,
    LSTMLanguageModel,
    LSTMLanguageModelOutput,
    LSTMLanguageModelPreTrainedModel,
)
from hf_ctxmodels.architectures.pretrained_word_vectors import (
    PretrainedEmbedding,
    PretrainedEmbeddingEncoder,
    PretrainedEmbeddingPreTrainedModel,
)
from hf_ctxmodels.architectures.query_generation import QueryForConditionalGeneration
from hf_ctxmodels.architectures.sentence_encoder import (
    RecurrentSentenceEncoder,
    encode_sentences,
    max_sentence_length,
    sentence_vectors,
)
from hf_ctxmodels.architectures.static_embeddings import StaticEmbedding, StaticEmbeddingModel, StaticPreTrainedModel
from hf_ctxmodels.architectures.transformer_decoder import DecoderHeadModel, TransformerDecoder
from hf_ctxmodels.architectures.transformer_encoder import TransformerEncoder, build_embeddings, build_encoder_layer
