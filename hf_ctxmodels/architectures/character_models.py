"""The base of families with a character encoder and bidirectional LSTM layers."""

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers import initialization as init

from hf_ctxmodels.architectures.character_vectors import CharacterVectors
from hf_ctxmodels.architectures.configuration_character import CtxCharacterConfig
from hf_ctxmodels.architectures.pretrained_word_vectors import (
    EmbeddingLoaderPreTrainedModel,
    open_pretrained_embeddings,
)
from hf_ctxmodels.architectures.static_embeddings import get_words_and_vectors
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.characters import CharacterEncoder
from hf_ctxmodels.layers.recurrent.lstm import LSTM
from hf_ctxmodels.layers.scalar_mix import ScalarMix
from hf_ctxmodels.tokenizers.character_level import encode_characters


class CharacterPreTrainedModel(EmbeddingLoaderPreTrainedModel):
    """The common model base of these families."""

    config: CtxCharacterConfig
    table_class = CharacterVectors
    token_id_axes: ClassVar[tuple[str, ...]] = ("characters",)
    id_limit_field: ClassVar[str] = "num_characters"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, CharacterEncoder | CharacterVectors):
            module.reset_parameters()
        elif isinstance(module, ScalarMix):
            init.zeros_(module.weights)
            init.ones_(module.gamma)
        else:
            super()._init_weights(module)

    @staticmethod
    def embedding_fields(source: str) -> dict[str, Any]:
        """Configuration fields for the word embeddings of a directory or Hub id.

        Pass them to a new model's configuration, or to `from_pretrained`; then call `load_pretrained_embeddings`.

        Raises:
            CtxError: The configuration or the tokenizer cannot be opened.
        """
        config, tokenizer = open_pretrained_embeddings(source, AutoConfig)
        return {
            "pretrained_embeddings": source,
            "pretrained_vocab_size": config.vocab_size,
            "pretrained_embedding_size": config.hidden_size,
            "pretrained_lower_case": bool(getattr(tokenizer, "do_lower_case", False)),
        }

    def copy_vectors(self, table: Any, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Copy the words' characters and vectors.

        Raises:
            CtxError: The model is no static word embedding, or the table has another size.
        """
        words, vectors, _ = get_words_and_vectors(model, tokenizer)
        width = self.config.max_characters_per_token
        ids = np.array([encode_characters(word, width) for word in words], dtype=np.int64).reshape(-1, width)
        table.fill(torch.from_numpy(ids), vectors)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Resize the output embeddings; the encoder does not depend on the vocabulary."""
        if new_num_tokens is not None or pad_to_multiple_of is not None:
            size, step = new_num_tokens or self.config.vocab_size, pad_to_multiple_of or 1
            size = -(-size // step) * step
            if (decoder := self.get_output_embeddings()) is not None:
                self.set_output_embeddings(self._get_resized_lm_head(decoder, size, mean_resizing=mean_resizing))
            self.config.vocab_size = size
        return self.get_input_embeddings()


class CharacterModel(CharacterPreTrainedModel):
    """A character encoder of words, and bidirectional LSTM layers.

    Attributes:
        characters: The character encoder.
        layers: The LSTM layers.
    """

    characters: CharacterEncoder
    layers: nn.ModuleList

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
            )
            for _ in range(config.num_hidden_layers)
        )

    def encode_words(self, characters: Tensor) -> Tensor:
        """(words, characters) ids -> (words, width); raises CtxError if words are shorter than the widest filter."""
        if characters.shape[1] < self.characters.max_filter_width:
            raise CtxError(
                f"input_ids have {characters.shape[1]} characters per word, but a filter has width "
                f"{self.characters.max_filter_width}.",
                hint=f"pad words to {self.config.max_characters_per_token} characters, as the tokenizer does.",
            )
        encode = self.characters if self.config.unpad else self.characters.plain
        return encode(characters)

    def get_input_embeddings(self) -> nn.Module:
        """The character embeddings."""
        return self.characters.embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the character embeddings."""
        self.characters.embeddings = value


def build_character_vectors(config: CtxCharacterConfig) -> CharacterVectors | None:
    """An empty table for the vectors of `config.pretrained_embeddings`; None without them.

    Raises:
        CtxError: The configuration lacks their number and width.
    """
    if not config.pretrained_embedding_size and config.pretrained_embeddings is None:
        return None
    if not config.pretrained_embedding_size:
        raise CtxError(
            "The configuration has pretrained_embeddings without their number and width.",
            location=config.pretrained_embeddings,
            hint="set all fields that the model class's embedding_fields(source) returns.",
        )
    return CharacterVectors(
        config.pretrained_vocab_size,
        config.pretrained_embedding_size,
        padding_character=config.padding_character,
        lower_case=config.pretrained_lower_case,
        trainable=config.train_pretrained_embeddings,
    )
