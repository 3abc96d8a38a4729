"""Families with a character encoder and bidirectional LSTM layers: their part of the model base.

A family derives its `...PreTrainedModel` from `CharacterPreTrainedModel` and its encoder from `CharacterModel`.
"""

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers import initialization as init

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.characters import CharacterEncoder
from hf_ctxmodels.layers.recurrent.lstm import LSTM
from hf_ctxmodels.layers.scalar_mix import ScalarMix
from hf_ctxmodels.models._shared.character_vectors import CharacterVectors
from hf_ctxmodels.models._shared.configuration_character import CtxCharacterConfig
from hf_ctxmodels.models._shared.pretrained_embeddings import VectorReaderPreTrainedModel, open_pretrained_embeddings
from hf_ctxmodels.models._shared.static import words_and_vectors
from hf_ctxmodels.tokenizers.characters import characters_of


class CharacterPreTrainedModel(VectorReaderPreTrainedModel):
    """The part of the model base that such families share."""

    config: CtxCharacterConfig
    table_class = CharacterVectors
    id_axes: ClassVar[tuple[str, ...]] = ("characters",)
    id_limit: ClassVar[str] = "num_characters"

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
        """The fields of a configuration that describe the word vectors of a directory or Hub id.

        Give them to a new model's configuration, or to `from_pretrained`; then call `load_pretrained_embeddings`.

        Raises:
            CtxError: The model's configuration or its tokenizer cannot be opened.
        """
        config, tokenizer = open_pretrained_embeddings(source, AutoConfig)
        lower_case = bool(getattr(tokenizer, "do_lower_case", False))
        fields = {"static_words": config.vocab_size, "static_size": config.hidden_size, "static_lower_case": lower_case}
        return {"pretrained_embeddings": source, **fields}

    def copy_vectors(self, table: Any, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Copy the words, as their characters, and their vectors.

        Raises:
            CtxError: The model has no vector for each word, or the table has another size.
        """
        words, vectors, _ = words_and_vectors(model, tokenizer)
        width = self.config.max_characters_per_token
        ids = np.array([characters_of(word, width) for word in words], dtype=np.int64).reshape(-1, width)
        table.fill(torch.from_numpy(ids), vectors)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Resize the output embeddings; the encoder reads characters and does not depend on the vocabulary."""
        if new_num_tokens is not None or pad_to_multiple_of is not None:
            size, step = new_num_tokens or self.config.vocab_size, pad_to_multiple_of or 1
            size = -(-size // step) * step
            if (decoder := self.get_output_embeddings()) is not None:
                self.set_output_embeddings(self._get_resized_lm_head(decoder, size, mean_resizing=mean_resizing))
            self.config.vocab_size = size
        return self.get_input_embeddings()


class CharacterModel(CharacterPreTrainedModel):
    """An encoder of words by their characters.

    Attributes:
        characters: Character ids of a word -> its vector.
        layers: Bidirectional LSTM layers.
    """

    characters: CharacterEncoder
    layers: nn.ModuleList

    def build_encoder(self, config: CtxCharacterConfig, word_size: int, input_size: int) -> None:
        """Create the character encoder and the layers.

        Args:
            config: Their sizes.
            word_size: Width of the character encoder's output.
            input_size: Width of the input of every layer.
        """
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
        """(words, characters) ids -> (words, width), each word independently.

        Raises:
            CtxError: Words have fewer characters than a filter is wide.
        """
        if characters.shape[1] < self.characters.widest:
            raise CtxError(
                f"input_ids have {characters.shape[1]} characters a word, but a filter reads {self.characters.widest}.",
                hint=f"give {self.config.max_characters_per_token} of every word, as the tokenizer does.",
            )
        encode = self.characters if self.config.unpad else self.characters.plain
        return encode(characters)

    def get_input_embeddings(self) -> nn.Module:
        """The characters' embeddings."""
        return self.characters.embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the characters' embeddings."""
        self.characters.embeddings = value


def build_character_vectors(config: CtxCharacterConfig) -> CharacterVectors | None:
    """Room for the word vectors of `config.pretrained_embeddings`; None without such a model.

    Raises:
        CtxError: The configuration does not know their number and width.
    """
    if not config.static_size and config.pretrained_embeddings is None:
        return None
    if not config.static_size:
        raise CtxError(
            "The configuration names pretrained_embeddings, but not the number and width of their vectors.",
            location=config.pretrained_embeddings,
            hint="give the configuration all fields that the model class's embedding_fields(source) returns.",
        )
    return CharacterVectors(
        config.static_words,
        config.static_size,
        padding_character=config.padding_character,
        lower_case=config.static_lower_case,
        trainable=config.static_trainable,
    )
