"""word2vec configuration (Mikolov et al. 2013a, arXiv 1301.3781; 2013b, arXiv 1310.4546)."""

from typing import Literal

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.architectures.configurations import CtxStaticConfig


@strict
class CtxWord2VecConfig(CtxStaticConfig):
    """Word vectors and their training; the defaults follow the released code.

    Args:
        architecture: "skip-gram" predicts the target from each context word, "cbow" from the mean of all context words.
        output: Training loss: "negative-sampling", "hierarchical-softmax" over a Huffman tree of the words, or
            "softmax" over the whole vocabulary, which both approximate.
        window: Maximum number of context words on either side.
        negative: Number of negative samples per prediction.
        update_blocks: Number of blocks of text per in-place update without numba. Fewer blocks are closer to the
            released code, more are faster; a small vocabulary needs few.
    """

    model_type = "ctx-word2vec"

    architecture: Literal["skip-gram", "cbow"] = "skip-gram"
    output: Literal["negative-sampling", "hierarchical-softmax", "softmax"] = "negative-sampling"
    window: int = 5
    negative: int = 5
    update_blocks: int = 32

    def validate_prediction(self) -> None:
        """Check the sizes (called at construction)."""
        self.require_positive("window", "negative", "update_blocks")
