"""Downstream heads of GPT-like decoders, which read a row's last token."""

from typing import Any

from torch import Tensor

from hf_ctxmodels.heads.downstream import SequenceHead
from hf_ctxmodels.layers.pooling import Pooling
from hf_ctxmodels.models._shared.transformer_decoder import without_trailing_padding


class LastTokenHead(SequenceHead):
    """A head on the last token's state, whatever the padding.

    Without an `attention_mask`, padding tokens at the end of a row are padding, as in transformers.
    """

    @property
    def pooling(self) -> Pooling:
        """Pooling of the tokens' states."""
        return super().pooling or "last"

    def encode(self, *, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """Run the decoder; `pooler_output` is the last token's state."""
        input_ids, padding = kwargs.get("input_ids"), self.config.pad_token_id
        if attention_mask is None and isinstance(input_ids, Tensor) and input_ids.dim() == 2 and padding is not None:
            attention_mask = without_trailing_padding(input_ids, padding)
        return super().encode(attention_mask=attention_mask, **kwargs)
