"""Static word embeddings: a vector for each word, and pooling."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.architectures.configurations import CtxStaticConfig
from hf_ctxmodels.architectures.recurrent_encoders import prepare_inputs, zero_padding
from hf_ctxmodels.core.batch_threads import torch_threads
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import select_true
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.pooling import PoolingLayer
from hf_ctxmodels.tokenizers.base import check_tokenizer_matches_model
from hf_ctxmodels.tokenizers.word_level import CtxWordTokenizer

# For numba kernels: sums in any order, but no assumption of finite numbers. Array expressions would cost a call each.
FASTMATH = {"reassoc", "contract", "arcp", "nsz"}


def supports_compiled_updates(weight: Tensor) -> bool:
    """Whether compiled code can update embeddings: float32, on a CPU, with numba installed."""
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and find_spec("numba") is not None


def run_in_threads(num_threads: int, update: Callable[..., Tensor], *batch: Tensor | None) -> Tensor:
    """Run `update` on chunks of a batch, one thread each, and return the sum of its losses. Threads update the same
    embeddings without locks, as in the released code of word2vec and GloVe."""
    batch_size = next(len(tensor) for tensor in batch if tensor is not None)
    num_threads = max(1, min(num_threads, batch_size))
    with torch_threads(1):
        if num_threads == 1:
            return update(*batch)
        chunks = [[None] * num_threads if tensor is None else tensor.chunk(num_threads) for tensor in batch]
        with ThreadPoolExecutor(num_threads) as executor:
            return torch.stack(list(executor.map(update, *chunks))).sum()


class StaticEmbedding(nn.Embedding):
    """`nn.Embedding` whose weights are initialized uniformly in +-0.5 / spread (in the released code of word2vec and
    GloVe, the width of the vectors), or without `spread` to zeros."""

    initializes_itself = True

    def __init__(
        self, num_embeddings: int, embedding_dim: int, spread: int | None, padding_idx: int | None = None
    ) -> None:
        self.spread = spread
        super().__init__(num_embeddings, embedding_dim, padding_idx=padding_idx)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the vectors; the vector of padding is zero."""
        if self.spread is None:
            init.zeros_(self.weight)
        else:
            init.uniform_(self.weight, -0.5 / self.spread, 0.5 / self.spread)
            if self.padding_idx is not None and not getattr(self.weight, "_is_hf_initialized", False):
                init.zeros_(self.weight[self.padding_idx])


class StaticPreTrainedModel(CtxPreTrainedModel):
    """Base class of static word embeddings and of their heads."""

    config: CtxStaticConfig
    supports_gradient_checkpointing = False  # there are no activations to recompute

    def static_embeddings(self) -> list[StaticEmbedding]:
        """All `StaticEmbedding` modules."""
        return [module for module in self.modules() if isinstance(module, StaticEmbedding)]

    def _resize_token_embeddings(
        self, new_num_tokens: int | None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Resize all embeddings as in transformers; without `mean_resizing`, new vectors are initialized."""
        for embedding in self.static_embeddings():
            old_size = embedding.num_embeddings
            self._get_resized_embeddings(embedding, new_num_tokens, pad_to_multiple_of, mean_resizing)
            new_size = embedding.num_embeddings - old_size
            if not mean_resizing and new_size > 0:
                initialized = StaticEmbedding(new_size, embedding.embedding_dim, embedding.spread)
                embedding.weight.data[old_size:] = initialized.weight.data.to(embedding.weight)
        return self.get_input_embeddings()

    def set_sparse_gradients(self, sparse: bool) -> None:
        """Set whether the gradients of the embeddings are sparse, which not every optimizer supports."""
        for embedding in self.static_embeddings():
            embedding.sparse = sparse


class StaticEmbeddingModel(StaticPreTrainedModel):
    """Word vectors: the state of a token is its word vector; `pooler_output` pools the vectors of a row."""

    _input_embed_layer = "word_embeddings"

    def __init__(self, config: CtxStaticConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.word_embeddings: nn.Embedding = self.build_embedding(config)
        self.pooler = PoolingLayer(config.pooling) if add_pooling_layer else None
        self.build_encoder(config)
        self.post_init()

    def build_embedding(self, config: CtxStaticConfig) -> StaticEmbedding:
        """Create a vector for each word."""
        return StaticEmbedding(config.vocab_size, config.hidden_size, config.hidden_size, config.pad_token_id)

    def build_encoder(self, config: CtxStaticConfig) -> None:
        """Create other modules of a family."""

    def embed_ids(self, input_ids: Tensor) -> Tensor:
        """(batch, length) ids -> (batch, length, hidden)."""
        return self.word_embeddings(input_ids)

    def vectors(self) -> Tensor:
        """(vocabulary, hidden) vectors of all words."""
        return self.embed_ids(torch.arange(self.config.vocab_size, device=self.device)[None])[0]

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        output_mask: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """Encode a batch. Other arguments and errors as in `prepare_inputs`.

        `hidden_states` is (`last_hidden_state`,). Arguments of other families' models are ignored.
        """
        width = self.config.hidden_size
        inputs = prepare_inputs(self, input_ids, inputs_embeds, attention_mask, sequence_ids, output_mask, width=width)
        states = zero_padding(inputs.embed(self.embed_ids), inputs.token_mask)
        return BaseModelOutputWithPooling(
            last_hidden_state=states if output_mask is None else select_true(states, output_mask),
            pooler_output=None if self.pooler is None else self.pooler(states, inputs.token_mask),
            hidden_states=(states,) if self.config.returns_hidden_states(output_hidden_states) else None,
        )


def get_words_and_vectors(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[str], Tensor, list[int]]:
    """Words without special tokens, their (words, width) float32 vectors on the CPU, and their ids.

    Raises:
        CtxError: The model has no static word embeddings, or its tokenizer is of another class or does not match it.
    """
    encoder: Any = model.base_model
    if not isinstance(encoder, StaticEmbeddingModel) or not isinstance(tokenizer, CtxWordTokenizer):
        raise CtxError(
            f"{type(model).__name__} with {type(tokenizer).__name__} has no static word embeddings.",
            hint="use a model of word2vec or GloVe with its tokenizer; a contextual model has vectors of words in "
            "a sentence: model(**tokenizer(sentence, return_tensors='pt')).last_hidden_state.",
        )
    check_tokenizer_matches_model(tokenizer, model.config)
    special_ids = set(tokenizer.all_special_ids)
    words = tokenizer.words
    ids = [token_id for token_id in range(len(words)) if token_id not in special_ids]
    with torch.no_grad():
        return [words[token_id] for token_id in ids], encoder.vectors()[ids].float().cpu(), ids
