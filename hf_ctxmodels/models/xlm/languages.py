"""Language ids and sinusoidal positions of XLM."""

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import check_aligned, check_ids
from hf_ctxmodels.models.xlm.configuration_xlm import CtxXLMConfig


class SinusoidalPositions(nn.Embedding):
    """Fixed positions: sines in the even columns, cosines in the odd columns (Vaswani et al. 2017, section 3.5)."""

    fixed_parameters = ("weight",)

    def __init__(self, positions: int, width: int) -> None:
        super().__init__(positions, width)
        self.weight.requires_grad_(False)

    def fill(self) -> None:
        """Initialise the weights, unless they were loaded."""
        positions, width = self.weight.shape
        pairs = torch.arange(width, dtype=torch.float64) // 2
        angles = torch.arange(positions, dtype=torch.float64)[:, None] / 10000 ** (2 * pairs / width)
        even = torch.arange(width) % 2 == 0
        init.copy_(self.weight, torch.where(even, angles.sin(), angles.cos()).to(self.weight))


def language_ids(config: CtxXLMConfig, words: Tensor, langs: Tensor | None, name: str = "langs") -> Tensor | None:
    """(batch, length) language id of each token; None for a model without language embeddings.

    Args:
        config: The model's configuration.
        words: (batch, length, ...) token ids or embeddings.
        langs: (batch, length), or None for `config.default_lang`.
        name: Name of the argument, for errors.

    Raises:
        CtxError: The languages are missing, of another shape or outside [0, n_langs).
    """
    batch_size, length = words.shape[:2]
    check_aligned({name: langs}, batch_size, length)
    check_ids(name, langs, config.n_langs, "n_langs")
    if not config.embeds_languages:
        return None
    if langs is not None:
        return langs
    if config.default_lang is None:
        names = sorted((config.lang2id or {}).items(), key=lambda item: item[1])
        ids = ", ".join(f"{number} {language}" for language, number in names) or f"0 to {config.n_langs - 1}"
        raise CtxError(
            f"The model has embeddings of {config.n_langs} languages, but {name} is missing.",
            hint=f"pass {name} (batch, length), the language id of each token ({ids}), for example by setting the "
            "tokenizer's `language`; or set config.default_lang.",
        )
    return torch.full((batch_size, length), config.default_lang, device=words.device)


def extend_languages(langs: Tensor, length: int) -> Tensor:
    """Truncate or extend (batch, steps) language ids to (batch, length); new tokens have the last language."""
    return torch.nn.functional.pad(langs, (0, max(0, length - langs.shape[1])), mode="replicate")[:, :length]
