"""Padding, as the collators of objectives import it; it is also that of fine-tuning (`data.padding`)."""

from hf_ctxmodels.data.padding import PaddingCollator, RowPadder

__all__ = ["PaddingCollator", "RowPadder"]
