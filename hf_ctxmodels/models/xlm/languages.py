"""Languages and positions of XLM: what stands beside the words."""

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import check_aligned, check_ids
from hf_ctxmodels.models.xlm.configuration_xlm import CtxXLMConfig


class SinusoidalPositions(nn.Embedding):
    """Fixed positions: sines in the even columns and cosines in the odd ones (Vaswani et al. 2017, section 3.5)."""

    fixed_parameters = ("weight",)

    def __init__(self, positions: int, width: int) -> None:
        super().__init__(positions, width)
        self.weight.requires_grad_(False)

    def fill(self) -> None:
        """Write the table, unless it was loaded."""
        positions, width = self.weight.shape
        pairs = torch.arange(width, dtype=torch.float64) // 2
        angles = torch.arange(positions, dtype=torch.float64)[:, None] / 10000 ** (2 * pairs / width)
        even = torch.arange(width) % 2 == 0
        init.copy_(self.weight, torch.where(even, angles.sin(), angles.cos()).to(self.weight))


def language_ids(config: CtxXLMConfig, words: Tensor, langs: Tensor | None, name: str = "langs") -> Tensor | None:
    """(batch, length) number of each token's language; None for a model without language embeddings.

    Args:
        config: The model's.
        words: (batch, length, ...) ids or embeddings.
        langs: (batch, length), or None for `config.default_lang`.
        name: The argument that they are given by.

    Raises:
        CtxError: The languages are missing, of another shape or outside [0, n_langs).
    """
    rows, length = words.shape[:2]
    check_aligned({name: langs}, rows, length)
    check_ids(name, langs, config.n_langs, "n_langs")
    if not config.embeds_languages:
        return None
    if langs is not None:
        return langs
    if config.default_lang is None:
        names = config.lang2id or {}
        known = ", ".join(f"{number} {each}" for each, number in sorted(names.items(), key=lambda item: item[1]))
        made = "; a tokenizer with a `language` makes them" if name == "langs" else ""
        raise CtxError(
            f"The model has embeddings of {config.n_langs} languages, but {name} is missing.",
            hint=f"give {name} (batch, length), the number of each token's language "
            f"({known or f'0 to {config.n_langs - 1}'}){made}. Or set config.default_lang for inputs of one language.",
        )
    return torch.full((rows, length), config.default_lang, device=words.device)


def extend_languages(langs: Tensor, length: int) -> Tensor:
    """(batch, given) languages for `length` tokens: further ones are in the language of the last."""
    return torch.nn.functional.pad(langs, (0, max(0, length - langs.shape[1])), mode="replicate")[:, :length]
