"""word2vec configuration (Mikolov et al. 2013a, arXiv 1301.3781; 2013b, arXiv 1310.4546)."""

from typing import Literal

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.architectures.configuration_static import CtxStaticConfig


@strict
class CtxWord2VecConfig(CtxStaticConfig):
    """Word vectors and their training; the defaults are those of the released code.

    Args:
        architecture: "skip-gram": each context word predicts the target by itself; "cbow": their mean does.
        output: The loss, "negative-sampling" or "hierarchical-softmax".
        window: Largest number of context words on either side.
        negative: Negatives per prediction.
        update_blocks: Blocks of text in one in-place update without numba: few are closer to the released code, many
            are faster. A small vocabulary needs few.
    """

    model_type = "ctx-word2vec"

    architecture: Literal["skip-gram", "cbow"] = "skip-gram"
    output: Literal["negative-sampling", "hierarchical-softmax"] = "negative-sampling"
    window: int = 5
    negative: int = 5
    update_blocks: int = 32

    def validate_prediction(self) -> None:
        """Check the sizes (called at construction)."""
        self.require_positive("window", "negative", "update_blocks")
