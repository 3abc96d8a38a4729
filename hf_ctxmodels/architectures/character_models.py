"""Character models: encoders of words from their characters, with bidirectional LSTM layers."""

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers import initialization as init

from hf_ctxmodels.architectures.configurations import CtxCharacterConfig
from hf_ctxmodels.architectures.pretrained_word_vectors import (
    load_pretrained_components,
    load_pretrained_embeddings,
    open_pretrained_embeddings,
)
from hf_ctxmodels.architectures.static_embeddings import get_words_and_vectors
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import on_host
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.layers.characters import CharacterEncoder, row_hashes
from hf_ctxmodels.layers.recurrent.rnn import LSTM
from hf_ctxmodels.tokenizers.character_level import SENTENCE_START, encode_characters

_FIRST_UPPER, _LAST_UPPER = ord("A") + 1, ord("Z") + 1  # character ids: bytes from 1 on
_TO_LOWER = ord("a") - ord("A")
_EMPTY_KEY = torch.iinfo(torch.int64).max


class CharacterVectors(nn.Module):
    """Pretrained word vectors, looked up by a hash of the characters of a word. Unknown words have a zero vector.

    Args:
        words: Maximum number of words.
        padding_character: Id of the padding after the end of a word.
        lower_case: Whether the words are lower-cased; the look-up then lower-cases the letters A to Z.
    """

    initializes_itself = True
    keys: Tensor

    def __init__(self, words: int, width: int, *, padding_character: int, lower_case: bool, trainable: bool) -> None:
        super().__init__()
        self.padding_character, self.lower_case = padding_character, lower_case
        self.fixed_parameters = () if trainable else ("table",)
        self.table = nn.Parameter(torch.zeros(words + 1, width), requires_grad=trainable)  # the last: unknown words
        self.register_buffer("keys", torch.full((words,), _EMPTY_KEY))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Remove all words."""
        init.zeros_(self.table)
        init.constant_(self.keys, _EMPTY_KEY)

    @torch.no_grad()
    def fill(self, character_ids: Tensor, vectors: Tensor) -> None:
        """Set (n, characters) words and their (n, width) vectors; of words with equal hashes, the first is kept."""
        if len(vectors) > len(self.keys) or vectors.shape[1] != self.table.shape[1]:
            raise CtxError(
                f"The vectors are {tuple(vectors.shape)}, but the model's table is {tuple(self.table[1:].shape)}."
            )
        sorted_keys, order = self._hash(character_ids).sort(stable=True)
        is_first = torch.ones_like(sorted_keys, dtype=torch.bool)
        is_first[1:] = sorted_keys[1:] != sorted_keys[:-1]
        sorted_keys, order = sorted_keys[is_first], order[is_first]
        keys = torch.full_like(self.keys, _EMPTY_KEY)
        keys[: len(sorted_keys)] = sorted_keys.to(keys.device)
        table = torch.zeros_like(self.table)
        table[: len(sorted_keys)] = vectors[order].to(table)
        self.keys.copy_(keys)
        self.table.copy_(table)

    def copy_vectors(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: CtxCharacterConfig
    ) -> None:
        """Copy the vectors of all words; raises CtxError for vectors of another size, or without vectors."""
        words, vectors, _ = get_words_and_vectors(model, tokenizer)
        width = config.max_characters_per_token
        ids = np.array([encode_characters(word, width) for word in words], dtype=np.int64).reshape(-1, width)
        self.fill(torch.from_numpy(ids), vectors)

    def _hash(self, character_ids: Tensor) -> Tensor:
        # so that keys do not depend on the padded width
        ids = character_ids.masked_fill(character_ids == self.padding_character, 0)
        if self.lower_case:
            ids = ids + _TO_LOWER * ((ids >= _FIRST_UPPER) & (ids <= _LAST_UPPER))
        return row_hashes(ids)

    def forward(self, character_ids: Tensor) -> Tensor:
        """(..., characters) ids -> (..., width)."""
        keys = self._hash(character_ids.flatten(0, -2))
        unknown = len(self.keys)
        indices = torch.searchsorted(self.keys, keys).clamp(max=unknown - 1)
        indices = torch.where(self.keys[indices] == keys, indices, unknown)
        return F.embedding(indices, self.table).unflatten(0, character_ids.shape[:-1])


def build_character_vectors(config: CtxCharacterConfig) -> CharacterVectors | None:
    """Empty `CharacterVectors` for the vectors of `config.pretrained_embeddings`; None without them."""
    if not config.pretrained_embedding_size and config.pretrained_embeddings is None:
        return None
    if not config.pretrained_embedding_size:
        raise CtxError(
            "The configuration has pretrained_embeddings without their number and width.",
            location=config.pretrained_embeddings,
            hint="set all fields that `embedding_fields(source)` of the model class returns.",
        )
    return CharacterVectors(
        config.pretrained_vocab_size,
        config.pretrained_embedding_size,
        padding_character=config.padding_character,
        lower_case=config.pretrained_lower_case,
        trainable=config.train_pretrained_embeddings,
    )


def second_text_mask(input_ids: Tensor) -> Tensor:
    """(batch, words) bool, the words from the second `<S>` on, with which the tokenizer begins each text of a pair;
    `input_ids` are (batch, words, characters)."""
    return on_host(lambda ids: (ids[..., 1] == SENTENCE_START).cumsum(1) > 1, input_ids)


class CharacterPreTrainedModel(CtxPreTrainedModel):
    """Base class of the character models."""

    config: CtxCharacterConfig
    supports_gradient_checkpointing = False  # the recurrence stores little more than its outputs
    token_id_axes: ClassVar[tuple[str, ...]] = ("characters",)
    id_limit_field: ClassVar[str] = "num_characters"
    vectors_class: ClassVar[type[nn.Module]] = CharacterVectors
    load_pretrained_embeddings = load_pretrained_embeddings
    load_pretrained_components = load_pretrained_components

    @staticmethod
    def embedding_fields(source: str) -> dict[str, Any]:
        """Configuration fields for the word embeddings of a directory or Hub id.

        Pass them to the configuration of a new model, or to `from_pretrained`; then call `load_pretrained_embeddings`.
        """
        config, tokenizer = open_pretrained_embeddings(source, AutoConfig)
        return {
            "pretrained_embeddings": source,
            "pretrained_vocab_size": config.vocab_size,
            "pretrained_embedding_size": config.hidden_size,
            "pretrained_lower_case": bool(getattr(tokenizer, "do_lower_case", False)),
        }

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Resize the output embeddings; the encoder does not depend on the vocabulary."""
        if new_num_tokens is not None or pad_to_multiple_of is not None:
            size, multiple = new_num_tokens or self.config.vocab_size, pad_to_multiple_of or 1
            size = -(-size // multiple) * multiple
            if (output_layer := self.get_output_embeddings()) is not None:
                self.set_output_embeddings(self._get_resized_lm_head(output_layer, size, mean_resizing=mean_resizing))
            self.config.vocab_size = size
        return self.get_input_embeddings()


class CharacterModel(CharacterPreTrainedModel):
    """A character encoder of words, and bidirectional LSTM layers."""

    def build_encoder(self, config: CtxCharacterConfig, word_size: int, input_size: int) -> None:
        """Create the character encoder, with an output of width `word_size`, and layers with inputs of `input_size`."""
        self.characters = CharacterEncoder(
            config.num_characters,
            config.character_embedding_size,
            config.filters or [],
            highway_layers=config.num_highway_layers,
            projection_size=word_size,
            padding_character=config.padding_character,
            activation=config.hidden_act,
        )
        self.layers = nn.ModuleList(
            LSTM(
                input_size,
                config.cell_size,
                projection_size=config.projection_size,
                cell_clip=config.cell_clip,
                projection_clip=config.projection_clip,
                joint_initialization=True,
            )
            for _ in range(config.num_hidden_layers)
        )

    def encode_words(self, characters: Tensor) -> Tensor:
        """(words, characters) ids -> (words, width); raises CtxError if words are narrower than the widest filter."""
        if characters.shape[1] < self.characters.max_filter_width:
            raise CtxError(
                f"input_ids have {characters.shape[1]} characters per word, but a filter has width "
                f"{self.characters.max_filter_width}.",
                hint=f"pad words to {self.config.max_characters_per_token} characters, as the tokenizer does.",
            )
        return (self.characters if self.config.unpad else self.characters.plain)(characters)

    def embed_ids(self, input_ids: Tensor) -> Tensor:
        """(batch, words, characters) ids -> (batch, words, width)."""
        words = on_host(lambda ids: ids.flatten(0, 1), input_ids)
        return self.encode_words(words).unflatten(0, input_ids.shape[:2])

    def get_input_embeddings(self) -> nn.Module:
        """The character embeddings."""
        return self.characters.embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the character embeddings."""
        self.characters.embeddings = value
