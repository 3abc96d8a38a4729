"""Families that read words by their characters and run over them in both directions: their part of the model base.

A family derives its `...PreTrainedModel` from `CharacterPreTrainedModel` and its encoder from `CharacterModel`.
"""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.characters import CharacterEncoder
from hf_ctxmodels.layers.recurrent.lstm import LSTM
from hf_ctxmodels.layers.scalar_mix import ScalarMix
from hf_ctxmodels.models._shared.character_vectors import CharacterVectors
from hf_ctxmodels.models._shared.configuration_character import CtxCharacterConfig
from hf_ctxmodels.models._shared.pretrained_embeddings import open_pretrained_embeddings
from hf_ctxmodels.models._shared.recurrent import RecurrentPreTrainedModel
from hf_ctxmodels.tokenizers.characters import characters_of


class CharacterPreTrainedModel(RecurrentPreTrainedModel):
    """The part of the model base that such families share."""

    config: CtxCharacterConfig
    id_axes: ClassVar[tuple[str, ...]] = ("characters",)
    id_limit: ClassVar[str] = "num_characters"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, CharacterEncoder):
            module.reset_parameters()
        elif isinstance(module, ScalarMix):
            init.zeros_(module.weights)
            init.ones_(module.gamma)
        elif isinstance(module, CharacterVectors):
            if not getattr(module.table, "_is_hf_initialized", False):
                fill_from_model(module, self.config)
        else:
            super()._init_weights(module)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Give what is as large as the vocabulary the new size; the encoder reads characters, whatever it is."""
        if new_num_tokens is not None or pad_to_multiple_of is not None:
            size, step = new_num_tokens or self.config.vocab_size, pad_to_multiple_of or 1
            size = -(-size // step) * step
            if (decoder := self.get_output_embeddings()) is not None:
                self.set_output_embeddings(self._get_resized_lm_head(decoder, size, mean_resizing=mean_resizing))
            self.config.vocab_size = size
        return self.get_input_embeddings()


class CharacterModel(CharacterPreTrainedModel):
    """Words from their characters.

    Attributes:
        characters: what reads them.
        layers: that run over them.
    """

    characters: CharacterEncoder
    layers: nn.ModuleList

    def build_encoder(self, config: CtxCharacterConfig, word_size: int, input_size: int) -> None:
        """Create what reads characters, and the layers of both directions.

        Args:
            config: their sizes.
            word_size: width that characters give a word.
            input_size: what a layer reads of every word.
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


def fixed_vectors(config: CtxCharacterConfig) -> CharacterVectors | None:
    """Room for the vectors of `config.pretrained_embeddings`, which is measured; None where there is no such model."""
    config.measure_static_model()
    if not config.static_size:
        return None
    return CharacterVectors(
        config.static_words,
        config.static_size,
        padding_character=config.padding_character,
        lower_case=config.static_lower_case,
        trainable=config.static_trainable,
    )


def fill_from_model(module: CharacterVectors, config: CtxCharacterConfig) -> None:
    """Give a new model the words and vectors of `config.pretrained_embeddings`.

    Raises:
        CtxError: it is not given, cannot be opened, or has no fixed vector for each word.
    """
    from hf_ctxmodels.io.word_vectors import WordVectors  # it imports the registry, and that all families

    source = config.pretrained_embeddings
    if source is None:
        raise CtxError(
            f"static_size={config.static_size}, but pretrained_embeddings is not given.",
            hint="name the model of the vectors.",
        )
    found = WordVectors.of_model(*open_pretrained_embeddings(source))
    width = config.max_characters_per_token
    spelled = np.array([characters_of(word, width) for word in found.words], dtype=np.int64)
    module.fill(torch.from_numpy(spelled), torch.from_numpy(found.matrix))
