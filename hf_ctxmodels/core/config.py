"""The configuration base every family derives from: strict about unknown fields, and deaf to a foreign `model_type`."""

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
        unpad: Run the encoder on the real tokens alone where that is exact (no attention weights asked for).
            `False` computes on padding too, as `transformers` does.
        tokenizer_digest: Which vocabulary the model was trained with, written by training and conversion; see
            `hf_ctxmodels.tokenizers.base.tokenizer_digest`. None is not checked.

    Raises:
        ValueError: A keyword that is no field of the configuration, with the nearest field names. Keywords read from a
            reference checkpoint's config.json (another `model_type`) are dropped instead, unless they ask for something
            this family cannot do (see `supported_reference_values`).
    """

    unpad: bool = True
    tokenizer_digest: str | None = None

    # What Trainer leaves out of the predictions it gathers: counts are no outputs of a row.
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "metrics"]

    # The field that holds the dropout rate before a task head; None in it means `hidden_dropout_prob`.
    head_dropout_field: ClassVar[str] = "classifier_dropout"

    # Fields the reference has not; an export leaves them out.
    own_fields: ClassVar[tuple[str, ...]] = ("unpad", "tokenizer_digest")
    # Reference field -> the values this family computes; any other value in a reference config.json is an error.
    supported_reference_values: ClassVar[dict[str, tuple[Any, ...]]] = {}

    def __post_init__(self, **kwargs: Any) -> None:
        # from_pretrained passes the file's model_type on; kept, it would hide this family's conversion table.
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
        """Position of a sequence's first token, where positions are numbers."""
        return 0

    @property
    def max_sequence_length(self) -> int | None:
        """Longest input in tokens; None for no limit."""
        rows = getattr(self, "max_position_embeddings", None)  # a model of relative positions has none, or -1
        return None if rows is None or rows < 0 else rows - self.first_position

    @property
    def task_size(self) -> int:
        """Width of what a task head reads of every token."""
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

    def reference_name(self, field: str) -> str:
        """What the reference calls a field of this configuration: the name that `attribute_map` reads it by."""
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
    """What Transformers have in common.

    Args: those of `CtxConfig`, and
        classifier_pooling: What heads that classify a sequence read: None for the paper's choice (the first token in
            most families), "mean" for the mean of its tokens' states. After short pretraining no single token stands
            for its sequence yet.
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
