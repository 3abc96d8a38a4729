"""One call of scaled dot-product attention on rows of equal length."""

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_ctxmodels.layers.attention.attention_with_dropout import attention_with_dropout


def attend_rows(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float, dropout: float
) -> Tensor:
    """One call on (batch, length, heads, head_dim) tensors.

    Args:
        query, key, value: The rows.
        mask: Additive, broadcastable to (batch, heads, queries, keys); None where all is seen.
        is_causal: Whether the mask is the plain causal one, for as many queries as keys.
        scale: Factor on the scores.
        dropout: Dropout on the probabilities.
    """
    query, key, value = (rows.transpose(1, 2) for rows in (query, key, value))
    if mask is not None:
        mask = mask.to(query.dtype)
    if 0 < dropout < 1 and query.device.type == "cpu":  # no kernel drops out there: torch would write the formula out
        if is_causal:
            mask = query.new_full((query.shape[2], key.shape[2]), float("-inf")).triu(1)
        context = attention_with_dropout(query, key, value, mask, scaling=scale, rate=dropout)
    else:
        context = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, scale=scale
        )
    return context.transpose(1, 2)
