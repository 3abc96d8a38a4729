"""GPT-3 configuration (Brown et al. 2020, section 2.1 and table 2.1)."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.models.gpt2.configuration_gpt2 import CtxGpt2Config


@strict
class CtxGpt3Config(CtxGpt2Config):
    """Shape and regularisation of GPT-3; the defaults are its smallest model (125M).

    Args: those of `CtxGpt2Config`, of which `max_position_embeddings` differs, and
        attention_layers: The attention of each layer, "dense" or "banded"; None for dense and banded layers in turn, as
            in the paper.
        window: Tokens that a banded layer's token sees, itself included. The paper does not give its width.
    """

    model_type = "ctx-gpt3"
    non_reference_fields: ClassVar[tuple[str, ...]] = (
        *CtxGpt2Config.non_reference_fields,
        "attention_layers",
        "window",
    )

    max_position_embeddings: int = 2048
    attention_layers: list[str] | None = None
    window: int = 256

    def validate_architecture(self) -> None:
        """Check that each layer has an attention (called at construction)."""
        super().validate_architecture()
        self.require_positive("window")
        given = self.attention_layers
        if given is None:
            return
        unknown = sorted(set(given) - {"dense", "banded"})
        if unknown or len(given) != self.num_hidden_layers:
            problem = f"names {unknown[0]!r}" if unknown else f"has {len(given)} entries"
            raise ValueError(
                f'attention_layers {problem}; give "dense" or "banded" for each of the {self.num_hidden_layers} '
                "layers, or None for both in turn."
            )

    @property
    def attention_types(self) -> list[str]:
        """The attention of each layer."""
        if self.attention_layers is not None:
            return self.attention_layers
        return ["banded" if number % 2 else "dense" for number in range(self.num_hidden_layers)]
