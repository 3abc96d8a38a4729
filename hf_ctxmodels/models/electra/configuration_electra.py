"""ELECTRA configuration (Clark et al. 2020, section 3.1 and appendix A)."""

from dataclasses import fields
from typing import Any, ClassVar, Literal, Self

from huggingface_hub.dataclasses import strict

from hf_ctxmodels.architectures.configurations import CtxEncoderConfig
from hf_ctxmodels.core.config import CtxConfig
from hf_ctxmodels.core.errors import CtxError


@strict
class CtxElectraConfig(CtxEncoderConfig):
    """Configuration of an ELECTRA discriminator and its generator; the defaults are ELECTRA-small.

    See `CtxEncoderConfig` for the other arguments.

    Args:
        embedding_size: Width of the token, position and segment embeddings.
        summary_type, summary_use_proj, summary_activation, summary_last_dropout: The multiple-choice head: the "first"
            token, an optional dense layer, an activation and dropout.
        generator_size: Relative width of the generator (section 3.2): factor of the residual stream, the feed-forward
            layer and the number of heads, rounded; the number of layers is the same.
        generator_overrides: Values of other fields of the generator.
        tie_generator: Weights shared with the generator (section 3.2): "embeddings" (token, position, segment, and
            their LayerNorm), "all" weights of the encoder (requires generator_size=1), or "none".
        freeze_generator: Do not train the generator: stage two of two-stage training (section 3.2). Requires
            `tie_generator="none"`.
        discriminator_task: The discriminator's task (section 3.5): "detection" of replaced tokens; "detection_masked"
            at the masked positions only ("ELECTRA 15%"); "replace_mlm", prediction of the original tokens at the masked
            positions; "all_tokens_mlm", prediction of all original tokens with a copy mechanism.
        discriminator_weight: Weight of the discriminator's loss (section 2, lambda).
        generator_task: The generator's training: "mlm", maximum likelihood, or "adversarial": REINFORCE with the
            discriminator's loss at the masked positions as the reward (appendix F), which requires a detection task.
    """

    model_type = "ctx-electra"
    reference_model_types: ClassVar[tuple[str, ...]] = ("electra",)

    embedding_size: int = 128
    hidden_size: int = 256
    num_attention_heads: int = 4
    intermediate_size: int = 1024
    classifier_dropout: float | int | None = None
    summary_type: Literal["first"] = "first"
    summary_use_proj: bool = True
    summary_activation: str | None = "gelu"
    summary_last_dropout: float | int = 0.1
    generator_size: float | int = 0.25
    generator_overrides: dict[str, Any] | None = None
    tie_generator: Literal["embeddings", "all", "none"] = "embeddings"
    freeze_generator: bool = False
    discriminator_task: Literal["detection", "detection_masked", "replace_mlm", "all_tokens_mlm"] = "detection"
    discriminator_weight: float | int = 50.0
    generator_task: Literal["mlm", "adversarial"] = "mlm"

    # fields of joint pretraining, which transformers does not have
    pair_fields: ClassVar[tuple[str, ...]] = (
        *("generator_size", "generator_overrides", "tie_generator", "freeze_generator"),
        *("discriminator_task", "discriminator_weight", "generator_task"),
    )
    supported_reference_values: ClassVar[dict[str, tuple[Any, ...]]] = {
        **CtxEncoderConfig.supported_reference_values,
        "summary_type": ("first",),
    }

    @classmethod
    def convert_reference_fields(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Remove the relative width that the released generators state as a string: their other fields are the sizes of
        the generator."""
        return {name: value for name, value in fields.items() if name != "generator_size"}

    def validate_architecture(self) -> None:
        """Also check the generator's fields (called at construction)."""
        super().validate_architecture()
        if self.generator_size <= 0:
            raise ValueError(f"generator_size={self.generator_size} must be above 0; ELECTRA-small has 0.25.")
        width = self._generator_values()["hidden_size"]
        if self.tie_generator != "none" and width > self.hidden_size:
            raise ValueError(
                f"The generator's width of {width} exceeds the discriminator's {self.hidden_size}, which "
                f"tie_generator={self.tie_generator!r} does not allow; set generator_size to at most 1, or "
                f'tie_generator="none".'
            )
        if self.freeze_generator and self.tie_generator != "none":
            raise ValueError(
                f"freeze_generator=True would freeze shared weights (tie_generator={self.tie_generator!r}); set "
                f'tie_generator="none".'
            )

        if self.generator_task == "adversarial" and (
            self.freeze_generator or self.discriminator_task not in ("detection", "detection_masked")
        ):
            raise ValueError(
                f'generator_task="adversarial" rewards a trained generator for undetected samples, but '
                f"freeze_generator={self.freeze_generator} and discriminator_task={self.discriminator_task!r}; set "
                f'generator_task="mlm", or discriminator_task="detection" and freeze_generator=False.'
            )

    def generator_config(self) -> Self:
        """The configuration of the generator.

        Raises:
            CtxError: The generator's heads do not divide its width, or its shape does not allow `tie_generator`.
        """
        values = self._generator_values()
        if values["hidden_size"] % values["num_attention_heads"]:
            raise CtxError(
                f"With generator_size={self.generator_size} the generator's {values['num_attention_heads']} attention "
                f"heads do not divide its width of {values['hidden_size']}.",
                hint="choose a size with a whole number of heads (1/4, 1/3, 1/2, ...), or set both in "
                'generator_overrides={"hidden_size": ..., "num_attention_heads": ...}.',
            )
        if values["vocab_size"] != self.vocab_size:
            raise CtxError(
                f"The generator has a vocabulary of {values['vocab_size']} tokens, the discriminator of "
                f"{self.vocab_size}.",
                hint="use the same vocabulary for both.",
            )
        for name in {"none": (), "embeddings": _EMBEDDING_FIELDS, "all": _ENCODER_FIELDS}[self.tie_generator]:
            if values[name] != getattr(self, name):
                raise CtxError(
                    f"tie_generator={self.tie_generator!r} shares weights, but {name} is {values[name]} in the "
                    f"generator and {getattr(self, name)} in the discriminator.",
                    hint='set tie_generator="none", or use equal values ("all" requires generator_size=1).',
                )
        config = type(self)(**values)
        config._attn_implementation = self._attn_implementation
        return config

    def with_generator(self, generator: Self, **changes: Any) -> Self:
        """A copy of this configuration with the generator of another one, and new values of other fields."""
        values = {name: getattr(self, name) for name in self._field_names()}
        values |= {"generator_size": generator.hidden_size / self.hidden_size, "generator_overrides": None, **changes}
        implied = type(self)(**values)._generator_values()
        overrides = {name: getattr(generator, name) for name in implied if implied[name] != getattr(generator, name)}
        return type(self)(**values | {"generator_overrides": overrides or None})

    def _field_names(self) -> list[str]:
        """The fields that classes of this package define."""
        names = {name for base in type(self).__mro__ if issubclass(base, CtxConfig) for name in base.__annotations__}
        return [field.name for field in fields(self) if field.name in names]

    def _generator_values(self) -> dict[str, Any]:
        shared = {name: getattr(self, name) for name in self._field_names() if name not in self.pair_fields}
        scaled = {
            name: max(1, round(getattr(self, name) * self.generator_size))
            for name in ("hidden_size", "intermediate_size", "num_attention_heads")
        }
        return shared | scaled | (self.generator_overrides or {})


_EMBEDDING_FIELDS = ("embedding_size", "max_position_embeddings", "type_vocab_size")
_ENCODER_FIELDS = (
    *_EMBEDDING_FIELDS,
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"),
)
