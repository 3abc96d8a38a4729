"""The base of all configurations: strict about unknown fields, and independent of a file's `model_type`."""

from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from hf_ctxmodels.core.code_copy import InstalledCode

# Keywords that PreTrainedConfig accepts without declaring them as fields, or that older checkpoints carry.
_PASSED_THROUGH = {
    "_commit_hash",
    "_name_or_path",
    "attn_implementation",
    "experts_implementation",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "torch_dtype",
    "transformers_version",
}


@strict
class CtxConfig(InstalledCode, PreTrainedConfig):
    """Fields and checks common to all families.

    Args:
        unpad: Compute without padding positions, where that is exact (without `output_attentions`). `False` computes
            them, as `transformers` does.

    Raises:
        ValueError: An unknown keyword; the message has the nearest field names. Unknown keywords from a reference
            checkpoint's config.json (another `model_type`) are dropped, unless their values are unsupported (see
            `supported_reference_values`).
    """

    unpad: bool = True

    # outputs that Trainer must not gather as predictions of rows
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "metrics"]

    # field of the dropout rate before a task head; its value None means `hidden_dropout_prob`
    head_dropout_field: ClassVar[str] = "classifier_dropout"

    # fields that the reference lacks; an export omits them
    own_fields: ClassVar[tuple[str, ...]] = ("unpad",)
    # reference field -> supported values; another value in a reference config.json is an error
    supported_reference_values: ClassVar[dict[str, tuple[Any, ...]]] = {}

    def __post_init__(self, **kwargs: Any) -> None:
        # from_pretrained passes the file's model_type; kept, it would hide this family's conversion table
        file_model_type = kwargs.pop("model_type", None)
        kwargs.pop("auto_map", None)
        unknown = set(kwargs) - _PASSED_THROUGH - _generation_keywords() - set(self.attribute_map)
        if file_model_type not in (None, self.model_type):
            self._check_reference_values(file_model_type, kwargs)
        elif unknown:
            raise ValueError(self._unknown_message(unknown))
        super().__post_init__(**{key: value for key, value in kwargs.items() if key not in unknown})

    @property
    def first_position(self) -> int:
        """Position of a sequence's first token."""
        return 0

    @property
    def max_sequence_length(self) -> int | None:
        """Longest input in tokens; None for no limit."""
        rows = getattr(self, "max_position_embeddings", None)  # None or -1 with relative positions
        return None if rows is None or rows < 0 else rows - self.first_position

    @property
    def task_size(self) -> int:
        """Width of a token's representation for task heads."""
        return self.hidden_size

    @property
    def pooled_size(self) -> int:
        """Width of `pooler_output`."""
        return self.hidden_size

    @property
    def head_dropout(self) -> float | int:
        """Dropout rate before a task head."""
        rate = getattr(self, self.head_dropout_field)
        return self.hidden_dropout_prob if rate is None else rate

    def require_positive(self, *names: str) -> None:
        """Raise ValueError unless the fields of these names are 1 or more."""
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more.")

    def require_two_directions(self) -> None:
        """Raise ValueError unless the directions of a bidirectional layer can share `hidden_size`."""
        if self.hidden_size % 2 or self.hidden_size < 2:
            raise ValueError(f"hidden_size={self.hidden_size} must be even: each direction has half of it.")

    def reference_name(self, field: str) -> str:
        """The reference's name of a field, by `attribute_map`."""
        return {own: name for name, own in self.attribute_map.items()}.get(field, field)

    def _check_reference_values(self, model_type: str, kwargs: dict[str, Any]) -> None:
        for key, supported in self.supported_reference_values.items():
            if key in kwargs and kwargs[key] not in supported:
                expected = " or ".join(repr(value) for value in supported)
                raise ValueError(
                    f"This {model_type!r} checkpoint has {key}={kwargs[key]!r}, which {type(self).__name__} cannot "
                    f"compute; it supports {key}={expected}. Open it with the `transformers` class it was saved by."
                )

    def _unknown_message(self, unknown: set[str]) -> str:
        import difflib

        fields = sorted(self.__dataclass_fields__)
        lines = []
        for key in sorted(unknown):
            near = difflib.get_close_matches(key, fields, n=2)
            lines.append(f"{key!r}" + (f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""))
        return f"{type(self).__name__} has no field {', '.join(lines)}. Its fields are: {', '.join(fields)}."


@strict
class CtxTransformerConfig(CtxConfig):
    """The base configuration of Transformers.

    Args: those of `CtxConfig`, and
        classifier_pooling: Input of sequence classification heads: None for the paper's choice (the first token in most
            families), "mean" for the mean of the tokens' states, which is better after short pretraining.
    """

    classifier_pooling: Literal["mean"] | None = None

    own_fields: ClassVar[tuple[str, ...]] = (*CtxConfig.own_fields, "classifier_pooling")

    def validate_architecture(self) -> None:
        """Check that the heads divide the width (called at construction)."""
        super().validate_architecture()
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}; "
                f"choose a number of heads that divides it."
            )


def _generation_keywords() -> set[str]:
    from transformers import GenerationConfig

    return set(GenerationConfig._get_default_generation_params())
