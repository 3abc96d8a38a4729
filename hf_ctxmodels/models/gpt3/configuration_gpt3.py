"""GPT-3 configuration (Brown et al. 2020, section 2.1 and table 2.1)."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.models.gpt2.configuration_gpt2 import CtxGpt2Config


@strict
class CtxGpt3Config(CtxGpt2Config):
    """Configuration of GPT-3; the defaults are its smallest model (125M). See `CtxGpt2Config` for the other arguments.

    Args:
        attention_layers: The attention of each layer, "dense" or "banded"; None alternates dense and banded layers, as
            in the paper.
        window: Number of tokens that a token attends to in a banded layer, including itself. The paper does not give
            the width.
    """

    model_type = "ctx-gpt3"
    reference_model_types: ClassVar[tuple[str, ...]] = ()
    non_reference_fields: ClassVar[tuple[str, ...]] = (
        *CtxGpt2Config.non_reference_fields,
        "attention_layers",
        "window",
    )

    max_position_embeddings: int = 2048
    attention_layers: list[str] | None = None
    window: int = 256

    def validate_architecture(self) -> None:
        """Check the attention type of each layer (called at construction)."""
        super().validate_architecture()
        self.require_positive("window")
        if self.attention_layers is None:
            return
        unknown = sorted(set(self.attention_layers) - {"dense", "banded"})
        if unknown or len(self.attention_layers) != self.num_hidden_layers:
            problem = f"has {unknown[0]!r}" if unknown else f"has {len(self.attention_layers)} entries"
            raise ValueError(
                f'attention_layers {problem}; use "dense" or "banded" for each of the {self.num_hidden_layers} '
                "layers, or None to alternate."
            )

    @property
    def attention_types(self) -> list[str]:
        """The attention of each layer, "dense" or "banded"."""
        if self.attention_layers is not None:
            return self.attention_layers
        return ["banded" if number % 2 else "dense" for number in range(self.num_hidden_layers)]
