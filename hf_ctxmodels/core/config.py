"""The base of all configurations: strict about unknown fields, and independent of a file's `model_type`."""

import difflib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.utils import logging

from hf_ctxmodels.core.config_validation import check_labels_and_dtype, check_numbers
from hf_ctxmodels.core.peft_support import register_peft_targets
from hf_ctxmodels.core.remote_code import InstalledCode, get_remote_code_stub

logger = logging.get_logger(__name__)

# Keywords that PreTrainedConfig accepts without declaring them as fields, or that older checkpoints carry.
_PASSED_THROUGH = {
    "_commit_hash",
    "_name_or_path",
    "attn_implementation",
    "experts_implementation",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
}
_FROM_FILE = "_from_file"  # the keyword by which `from_dict` tells `__post_init__` where the others come from
_SAME_WORD = 0.8  # difflib's ratio of two names from which one is taken for a misspelling of the other

_REFERENCE = "_reference_model_type"  # the keyword by which `get_config_dict` passes on the file's `model_type`


@strict
class CtxConfig(InstalledCode, PreTrainedConfig):
    """Fields and checks common to all families.

    A keyword that is no field is an error in a call of the class, and in what calls it (a recipe, an option). What
    transformers, its tools or a user set on a configuration is saved with it, so a file may hold other keys: they
    become attributes again. A file that holds a key like a field's name in the field's place is an error too; beside
    the field, a warning.

    Args:
        pad_token_id, bos_token_id, eos_token_id: Ids of the tokenizer's special tokens; None where there is none.
        unpad: Compute without padding positions, where that is exact (without `output_attentions`). `False` computes
            them, as `transformers` does.
        return_logits_with_labels: Whether language models given labels return the logits of all positions beside the
            loss, at the cost of the last layer and the product with the vocabulary's matrix at every position, and of
            (batch, length, vocabulary) numbers; False computes those at labelled positions only. None returns them in
            evaluation without gradients, as in Trainer's, whose metrics read them.
        tokenizer_digest: The vocabulary that the model was trained with, written by training and conversion; see
            `hf_ctxmodels.tokenizers.base.tokenizer_digest`. None is not checked.
        layer_mix: Whether heads of tasks read a learned mix of the encoder's layers, as ELMo's do, in place of the last
            one; of an encoder-decoder the decoder's.

    Raises:
        ValueError: An unknown keyword; the message has the nearest field names. Unknown keywords from a reference
            checkpoint's config.json (another `model_type`) are dropped, unless their values are unsupported (see
            `supported_reference_values`).
    """

    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    unpad: bool = True
    return_logits_with_labels: bool | None = None
    tokenizer_digest: str | None = None
    layer_mix: bool = False

    # outputs that Trainer must not gather as predictions of rows
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "encoder_last_hidden_state", "metrics"]

    # field of the dropout rate before a task head; its value None means `hidden_dropout_prob`
    head_dropout_field: ClassVar[str] = "classifier_dropout"

    # linear maps that PEFT adapts where its configuration names none
    peft_target_modules: ClassVar[tuple[str, ...]] = ()

    # the embeddings of a new model are the tokenizer's vocabulary rounded up to a multiple of it
    vocab_size_multiple: ClassVar[int] = 1

    # fields that the reference lacks; an export omits them
    non_reference_fields: ClassVar[tuple[str, ...]] = (
        "unpad",
        "return_logits_with_labels",
        "tokenizer_digest",
        "layer_mix",
    )
    # `model_type` of the reference implementation, where it is not the family's without its prefix
    reference_model_type: ClassVar[str | None] = None
    # `model_type` of other models in transformers that the family opens
    extra_reference_model_types: ClassVar[tuple[str, ...]] = ()
    # reference field -> supported values; another value in a reference config.json is an error
    supported_reference_values: ClassVar[dict[str, tuple[Any, ...]]] = {}

    def __post_init__(self, **kwargs: Any) -> None:
        # from_pretrained passes the file's model_type; kept, it would hide this family's conversion table
        file_model_type = kwargs.pop("model_type", None)
        file_model_type = kwargs.pop(_REFERENCE, file_model_type)
        kwargs.pop("auto_map", None)
        file_keys = kwargs.pop(_FROM_FILE, None)
        unknown = set(kwargs) - _PASSED_THROUGH - _generation_keywords() - set(self.attribute_map)
        if file_model_type not in (None, self.model_type):
            self._check_reference_values(file_model_type, kwargs)
            kwargs = {key: value for key, value in kwargs.items() if key not in unknown}
        elif file_keys is not None:
            self._check_file_keys(unknown, file_keys)
        elif unknown:
            raise ValueError(self._unknown_message(unknown))
        check_labels_and_dtype(self.id2label, kwargs.get("num_labels"), kwargs.get("torch_dtype") or self.dtype)
        super().__post_init__(**kwargs)
        if self.id2label is not None and self.label2id is None:  # zero-shot classification looks a label up in it
            self.label2id: dict[str, int] | dict[str, str] | None = {
                label: number for number, label in self.id2label.items()
            }

    def validate_architecture(self) -> None:
        """Check the bounds of all fields, see `core.config_validation` (called at construction)."""
        super().validate_architecture()
        check_numbers({field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers, of a dictionary that `to_dict` made or a config.json holds; `from_pretrained` calls it.

        Raises:
            ValueError: A key looks like a misspelt field that the dictionary lacks.
        """
        return super().from_dict({**config_dict, _FROM_FILE: frozenset(config_dict)}, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """As in transformers. PEFT reads it before it looks up what it adapts, which is told here."""
        register_peft_targets(self.model_type, self.peft_target_modules)
        return super().to_dict()

    @classmethod
    def from_json_file(cls, json_file: str | Path) -> Self:
        """As in transformers, by `from_dict`."""
        return cls.from_dict(cls._dict_from_json_file(json_file))

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """As in transformers; a reference checkpoint is given this family's `model_type`.

        For any other than the class's, `from_pretrained` warns that it is not supported, which reference checkpoints
        are.
        """
        fields, unused = super().get_config_dict(*args, **kwargs)
        if fields.get("model_type") == (cls.reference_model_type or cls.model_type.removeprefix("ctx-")):
            fields = {**fields, "model_type": cls.model_type, _REFERENCE: fields["model_type"]}
        return fields, unused

    def save_pretrained(self, save_directory: str | PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save config.json, and the stub for `trust_remote_code=True` (`core.remote_code`); part of saving a model, too."""
        if (stub := get_remote_code_stub(self)) is None:
            return super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)
        stub.write(save_directory)  # before what is new in the directory is pushed
        self.auto_map = stub.auto_map  # written as every attribute is; of the file, not of the configuration
        try:
            super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)
        finally:
            del self.auto_map

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
    def head_input_size(self) -> int:
        """Width of a token's representation for task heads."""
        return self.hidden_size

    @property
    def pooler_size(self) -> int:
        """Width of `pooler_output`."""
        return self.hidden_size

    @property
    def head_dropout(self) -> float | int:
        """Dropout rate before a task head."""
        rate = getattr(self, self.head_dropout_field)
        return self.hidden_dropout_prob if rate is None else rate

    def resolve_output_flags(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """`output_hidden_states` and `output_attentions` of a call, or this configuration's where they are None."""
        names = ("output_hidden_states", "output_attentions")
        return {name: getattr(self, name) if given.get(name) is None else given[name] for name in names}

    def require_positive(self, *names: str) -> None:
        """Raise ValueError unless the fields of these names are 1 or more."""
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more.")

    def require_even_hidden_size(self) -> None:
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

    def _check_file_keys(self, unknown: set[str], file_keys: frozenset[str]) -> None:
        """Refuse what cannot be an attribute, or replaces a field: a file that was saved holds every field of ours."""
        methods = {key for key in unknown if not _can_be_set(type(self), key)}
        if methods:
            raise ValueError(f"{type(self).__name__} uses the name {min(methods)!r} itself; take it out of the file.")
        own = {field.name for field in fields(self)} - {field.name for field in fields(PreTrainedConfig)}
        misspelt = {key for key in unknown if _like(key, own - file_keys)}
        if misspelt:
            raise ValueError(self._unknown_message(misspelt))
        for key in sorted(unknown):
            if near := _like(key, own):
                logger.warning(
                    f"The configuration file has {key!r} beside {near!r}. {type(self).__name__} has no such field; it "
                    "is kept as an attribute, without effect."
                )

    def _unknown_message(self, unknown: set[str]) -> str:
        known = sorted(field.name for field in fields(self))
        lines = []
        for key in sorted(unknown):
            near = difflib.get_close_matches(key, known, n=2)
            lines.append(f"{key!r}" + (f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""))
        return f"{type(self).__name__} has no field {', '.join(lines)}. Its fields are: {', '.join(known)}."


@strict
class CtxTransformerConfig(CtxConfig):
    """The base configuration of Transformers.

    Args: those of `CtxConfig`, and
        classifier_pooling: Input of sequence classification heads: None for the paper's choice (the first token in most
            families), "mean" for the mean of the tokens' states, which is better after short pretraining.
    """

    classifier_pooling: Literal["mean"] | None = None

    peft_target_modules: ClassVar[tuple[str, ...]] = ("qkv_proj",)
    non_reference_fields: ClassVar[tuple[str, ...]] = (*CtxConfig.non_reference_fields, "classifier_pooling")

    def validate_architecture(self) -> None:
        """Check that the heads divide the width, unless `head_dim` says theirs (called at construction)."""
        super().validate_architecture()
        if getattr(self, "head_dim", None) is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}; "
                f"choose a number of heads that divides it."
            )


def _like(name: str, known: Iterable[str]) -> str | None:
    """The field that `name` may be a misspelling of."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=_SAME_WORD)), None)


def _can_be_set(config_class: type, name: str) -> bool:
    """Whether an instance may have an attribute of this name: not that of a method or of a read-only property."""
    found = inspect.getattr_static(config_class, name, None)
    if isinstance(found, property):
        return found.fset is not None
    return not (callable(found) or isinstance(found, classmethod | staticmethod))


def _generation_keywords() -> set[str]:
    from transformers import GenerationConfig

    return set(GenerationConfig._get_default_generation_params())
