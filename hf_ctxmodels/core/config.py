"""Base classes of all configurations: unknown fields are errors, and any `model_type` of a file is accepted."""

import difflib
import inspect
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PreTrainedConfig
from transformers.utils import logging

from hf_ctxmodels.core.adapter_support import register_peft_targets
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.remote_code import InstalledCode, get_remote_code_stub

logger = logging.get_logger(__name__)

# Keywords that PreTrainedConfig accepts without declaring them as fields, or that older checkpoints carry.
_UNDECLARED_KEYWORDS = {
    "_commit_hash",
    "_name_or_path",
    "attn_implementation",
    "experts_implementation",
    "low_rank_modules",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "pruned_heads",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
}
_FILE_KEYS = "_file_keys"  # keyword in which `from_dict` passes the keys of a file to `__post_init__`
REFERENCE_KEY = "_reference_model_type"  # keyword in which `get_config_dict` passes on the file's `model_type`
_MISSPELLING_RATIO = 0.8  # smallest `difflib` ratio of a name and its misspelling

_MAX_INTEGER = 2**31 - 1
_MAX_MODULES, _MAX_LABELS = 10_000, 1_000_000  # each layer and each label takes memory for an object

_POSITIVE_FIELDS = {
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "embedding_size",
    "character_embedding_size",
    "max_characters_per_token",
    "update_threads",
}
_MODULE_COUNTS = {
    "num_hidden_layers",
    "num_hidden_groups",
    "inner_group_num",
    "num_highway_layers",
    "num_decoder_layers",
    "num_mixes",
    "pretrained_layers",
}


class _AutoMap(dict[str, str]):
    """The empty `auto_map` of a configuration, which gets an attribute if an entry is added."""

    def __init__(self, config: "CtxConfig") -> None:
        super().__init__()
        self.config = config

    def __setitem__(self, name: str, reference: str) -> None:
        self.config.auto_map = {name: reference}


@strict
class CtxConfig(InstalledCode, PreTrainedConfig):
    """Fields and checks common to all families.

    An unknown keyword argument is an error. Attributes that transformers, other tools or the user add to a
    configuration are saved with it, so unknown keys of a file become attributes. However, a key that resembles a
    field's name is an error if the file lacks the field, and a warning otherwise.

    The sizes and rates below are fields of the families that need them, which set the defaults.

    Args:
        vocab_size: Number of tokens, special tokens included; of the source if there is a `target_vocab_size`.
        hidden_size: Width of the hidden states.
        num_hidden_layers: Number of layers; in an encoder-decoder, of the encoder.
        classifier_dropout: Dropout before the task heads; None, where allowed, for `hidden_dropout_prob`.
        is_encoder_decoder: Whether the model has a decoder for generation; set by the family.
        decoder_start_token_id: Id of the decoder's first input.
        tie_word_embeddings: Share the output layer with the word embeddings.
        pad_token_id, bos_token_id, eos_token_id: Ids of the tokenizer's special tokens; None if there is none.
        unpad: Skip padding positions where the result is equal (without `output_attentions`); False computes them, as
            `transformers` does.
        return_logits_with_labels: Whether language models with labels return the logits of all positions in addition to
            the loss. This takes the last layer and the output projection at every position, and (batch, length,
            vocabulary) numbers; with False, only labeled positions are computed. None returns them in evaluation
            without gradients, where Trainer's metrics need them.
        tokenizer_digest: Identifies the vocabulary that the model was trained with; set by training and conversion, see
            `hf_ctxmodels.tokenizers.base.tokenizer_digest`. None is not checked.
        layer_mix: Whether task heads read a learned mix of the layers, as in ELMo, instead of the last layer; in an
            encoder-decoder, of the layers of the decoder.

    Raises:
        ValueError: A keyword is unknown; the message suggests similar field names. Unknown keys of a reference
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

    # outputs that Trainer must not gather as predictions
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "encoder_last_hidden_state", "metrics"]

    # field of the dropout rate before a task head; None stands for `hidden_dropout_prob`
    head_dropout_field: ClassVar[str] = "classifier_dropout"

    # linear layers that PEFT adapts by default
    peft_target_modules: ClassVar[tuple[str, ...]] = ()

    # the vocabulary size of a new model is rounded up to a multiple of this
    vocab_size_multiple: ClassVar[int] = 1

    # sizes of the vocabularies whose padding token has an embedding of zeros
    padded_vocabularies: ClassVar[tuple[str, ...]] = ()

    # fields that transformers lacks; an export omits them
    non_reference_fields: ClassVar[tuple[str, ...]] = (
        "unpad",
        "return_logits_with_labels",
        "tokenizer_digest",
        "layer_mix",
    )
    # `model_type` of the models in transformers whose checkpoints the family loads, its reference first; a family
    # overrides it, with () if transformers lacks the model; see `convert_reference_fields`
    reference_model_types: ClassVar[tuple[str, ...]] = ()
    # field in transformers -> supported values; another value in a config.json is an error
    supported_reference_values: ClassVar[dict[str, tuple[Any, ...]]] = {}

    def __post_init__(self, **kwargs: Any) -> None:
        from transformers import GenerationConfig

        # from_pretrained passes the file's model_type, which would hide the weight conversion of this class
        file_model_type = kwargs.pop("model_type", None)
        file_model_type = kwargs.pop(REFERENCE_KEY, file_model_type)
        kwargs.pop("auto_map", None)
        file_keys = kwargs.pop(_FILE_KEYS, None)
        generation_fields = set(GenerationConfig._get_default_generation_params())
        unknown = set(kwargs) - _UNDECLARED_KEYWORDS - generation_fields - set(self.attribute_map)
        if file_model_type not in (None, self.model_type):
            self._check_reference(file_model_type, kwargs)
            kwargs = {key: value for key, value in kwargs.items() if key not in unknown}
        elif file_keys is not None:
            self._check_file_keys(unknown, file_keys)
        elif unknown:
            raise ValueError(self._unknown_message(unknown))
        self._check_labels_and_dtype(kwargs.get("num_labels"), kwargs.get("torch_dtype") or self.dtype)
        super().__post_init__(**kwargs)
        if self.id2label is not None and self.label2id is None:  # zero-shot classification looks a label up in it
            self.label2id: Any = dict(zip(self.id2label.values(), self.id2label))

    def validate_architecture(self) -> None:
        """Check the bounds of all fields (called at construction)."""
        super().validate_architecture()
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if not math.isfinite(value):
                raise ValueError(f"{name}={value} must be a finite number.")
            if isinstance(value, int) and abs(value) > _MAX_INTEGER:
                raise ValueError(f"{name}={_short_repr(value)} must not be above {_MAX_INTEGER:,}.")
            if name in _POSITIVE_FIELDS and value < 1:
                raise ValueError(f"{name}={value} must be 1 or more.")
            minimum = 1 if name == "num_hidden_layers" else 0
            if name in _MODULE_COUNTS and not minimum <= value <= _MAX_MODULES:
                raise ValueError(f"{name}={value} must be between {minimum} and {_MAX_MODULES:,}.")
            if "dropout" in name and name != "dropout_scale" and not 0 <= value <= 1:
                raise ValueError(f"{name}={value} is a rate, and must be between 0 and 1.")
        for name in self.padded_vocabularies:
            if self.pad_token_id is not None and not 0 <= self.pad_token_id < getattr(self, name):
                raise ValueError(
                    f"pad_token_id={self.pad_token_id} must be None, or at least 0 and below "
                    f"{name}={getattr(self, name)}."
                )

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Create a configuration from a dictionary; a key that resembles a field that it lacks raises ValueError."""
        return super().from_dict({**config_dict, _FILE_KEYS: frozenset(config_dict)}, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name. Also register `peft_target_modules`, which PEFT reads after `to_dict`."""
        if "peft.utils.constants" in sys.modules:
            register_peft_targets(self.model_type, self.peft_target_modules)
        return super().to_dict()

    @classmethod
    def from_json_file(cls, json_file: str | Path) -> Self:
        """Create a configuration from a JSON file, see `from_dict`."""
        return cls.from_dict(cls._dict_from_json_file(json_file))

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read config.json; convert the fields and `model_type` of a reference, for which transformers would warn."""
        fields, unused = super().get_config_dict(*args, **kwargs)
        if (model_type := fields.get("model_type")) in cls.reference_model_types:
            fields = {**cls.convert_reference_fields(fields), "model_type": cls.model_type, REFERENCE_KEY: model_type}
        return fields, unused

    @classmethod
    def convert_reference_fields(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Convert the fields of a config.json with one of `reference_model_types`; by default they are unchanged."""
        return fields

    @property
    def auto_map(self) -> dict[str, str]:
        """Auto class -> class of custom code in the repository; empty except while config.json is written, and with
        entries of a user's `register_for_auto_class`. trl reads it of each class that transformers lacks."""
        return self.__dict__.get("auto_map", _AutoMap(self))

    @auto_map.setter
    def auto_map(self, value: dict[str, str]) -> None:
        self.__dict__["auto_map"] = value  # transformers saves all attributes

    def save_pretrained(self, save_directory: str | PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save config.json, and the module for `trust_remote_code=True` (see `core.remote_code`)."""
        if (stub := get_remote_code_stub(self)) is None:
            return super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)
        stub.write(save_directory)  # before the directory's files are pushed to the Hub
        registered = dict(self.auto_map)
        self.auto_map = stub.auto_map(self.architectures) | registered
        try:
            super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)
        finally:
            self.__dict__.pop("auto_map")
            if registered:
                self.auto_map = registered

    @property
    def first_position(self) -> int:
        """Position index of a sequence's first token."""
        return 0

    @property
    def max_sequence_length(self) -> int | None:
        """Longest input in tokens; None for no limit."""
        positions = getattr(self, "max_position_embeddings", None)  # None or -1 with relative positions
        return None if positions is None or positions < 0 else positions - self.first_position

    @property
    def head_input_size(self) -> int:
        """Width of a token's representation in task heads."""
        return self.hidden_size

    @property
    def pooler_size(self) -> int:
        """Width of `pooler_output`, which is doubled by the pooling "mean+max"."""
        return self.head_input_size * (2 if getattr(self, "pooling", None) == "mean+max" else 1)

    @property
    def head_dropout(self) -> float | int:
        """Dropout rate before a task head."""
        rate = getattr(self, self.head_dropout_field)
        return self.hidden_dropout_prob if rate is None else rate

    def resolve_output_flags(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return `output_hidden_states` and `output_attentions` of a call; None means the configuration's value."""
        names = ("output_hidden_states", "output_attentions")
        return {name: getattr(self, name) if arguments.get(name) is None else arguments[name] for name in names}

    def returns_hidden_states(self, output_hidden_states: Any) -> bool:
        """Whether a call with this argument, which may also be the number of a layer or a list of numbers, returns
        hidden states; None means the configuration's value."""
        selection = self.output_hidden_states if output_hidden_states is None else output_hidden_states
        return selection is not None and selection is not False

    def require_positive(self, *names: str) -> None:
        """Raise ValueError unless these fields are 1 or more."""
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more.")

    def require_even_hidden_size(self) -> None:
        """Raise ValueError unless `hidden_size` can be divided between two directions."""
        if self.hidden_size % 2 or self.hidden_size < 2:
            raise ValueError(f"hidden_size={self.hidden_size} must be even: each direction has half of it.")

    def reference_name(self, field: str) -> str:
        """A field's name in transformers, from `attribute_map`."""
        return {native: name for name, native in self.attribute_map.items()}.get(field, field)

    def _check_labels_and_dtype(self, num_labels: Any, dtype: Any) -> None:
        """Raise ValueError for labels and names of data types that transformers would fail on, or never finish with."""
        labels = self.id2label
        has_ids = isinstance(labels, Mapping) and all(str(label_id).isdecimal() for label_id in labels)
        if labels is not None and not has_ids:
            raise ValueError(f"id2label={_short_repr(labels)} must map ids of labels to their names.")
        is_count = isinstance(num_labels, int) and not isinstance(num_labels, bool)
        if num_labels is not None and not (is_count and 1 <= num_labels <= _MAX_LABELS):
            raise ValueError(f"num_labels={_short_repr(num_labels)} must be between 1 and {_MAX_LABELS:,}.")
        if isinstance(dtype, str) and not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ValueError(f"dtype={_short_repr(dtype)} is not a data type of torch such as 'float32'.")

    def _check_reference(self, model_type: str, kwargs: dict[str, Any]) -> None:
        """Raise for a checkpoint of another architecture, or with unsupported values. Checkpoints of other families of
        this package share modules with this one; `from_pretrained` warns."""
        supported_types = self.reference_model_types
        if model_type not in supported_types and not model_type.startswith("ctx-"):
            raise ValueError(
                f"This checkpoint is a model of type {model_type!r}, which {type(self).__name__} does not load; it "
                f"loads {', '.join(map(repr, (self.model_type, *supported_types)))}. Load it with the `transformers` "
                "class that saved it."
            )
        for key, supported in self.supported_reference_values.items():
            if key in kwargs and kwargs[key] not in supported:
                expected = " or ".join(repr(value) for value in supported)
                raise ValueError(
                    f"This {model_type!r} checkpoint has {key}={kwargs[key]!r}, which {type(self).__name__} cannot "
                    f"compute; it supports {key}={expected}. Load it with the `transformers` class that saved it."
                )

    def _check_file_keys(self, unknown: set[str], file_keys: frozenset[str]) -> None:
        """Raise for keys that cannot be attributes, and for misspelled fields; a saved file has all fields."""
        methods = {key for key in unknown if not _can_be_set(type(self), key)}
        if methods:
            raise ValueError(
                f"{type(self).__name__} has a method named {min(methods)!r}; remove this key from the file."
            )
        package_fields = {field.name for field in fields(self)} - {field.name for field in fields(PreTrainedConfig)}
        misspelled = {key for key in unknown if _similar_name(key, package_fields - file_keys)}
        if misspelled:
            raise ValueError(self._unknown_message(misspelled))
        for key in sorted(unknown):
            if field_name := _similar_name(key, package_fields):
                logger.warning(
                    f"The configuration file has {key!r} in addition to {field_name!r}. {type(self).__name__} has no "
                    "such field; it becomes an attribute without effect."
                )

    def _unknown_message(self, unknown: set[str]) -> str:
        names = sorted(field.name for field in fields(self))
        lines = []
        for key in sorted(unknown):
            similar = difflib.get_close_matches(key, names, n=2)
            lines.append(f"{key!r}" + (f" (did you mean {' or '.join(map(repr, similar))}?)" if similar else ""))
        return f"{type(self).__name__} has no field {', '.join(lines)}. Its fields are: {', '.join(names)}."


@strict
class CtxTransformerConfig(CtxConfig):
    """Base configuration of Transformers; see `CtxConfig` for the other arguments.

    Args:
        num_attention_heads: Attention heads per layer; they divide `hidden_size` unless there is a `head_dim`.
        intermediate_size: Width of the feed-forward layer; None, where allowed, for 4 * hidden_size.
        hidden_act: Activation of the feed-forward layer; "gelu_new" is the tanh approximation of GELU.
        hidden_dropout_prob: Dropout after the embeddings and after each sub-layer.
        attention_probs_dropout_prob: Dropout on attention probabilities.
        max_position_embeddings: Longest sequence, in tokens; in an encoder-decoder, longest source and longest target.
        initializer_range: Standard deviation of the normal initialization.
        layer_norm_eps: Epsilon of the normalization layers.
        classifier_pooling: Input of sequence classification heads: None for the paper's choice (in most families the
            first token), "mean" for the mean of all states, which is better after short pretraining.
    """

    classifier_pooling: Literal["mean"] | None = None

    peft_target_modules: ClassVar[tuple[str, ...]] = ("qkv_proj",)
    non_reference_fields: ClassVar[tuple[str, ...]] = (*CtxConfig.non_reference_fields, "classifier_pooling")

    def validate_architecture(self) -> None:
        """Check that the width is a multiple of the heads, unless `head_dim` is set (called at construction)."""
        super().validate_architecture()
        if getattr(self, "head_dim", None) is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}; "
                f"choose a number of heads that divides it."
            )

    @property
    def feed_forward_size(self) -> int:
        """Width of the feed-forward layer: `intermediate_size`, or 4 * hidden_size if it is None."""
        return 4 * self.hidden_size if self.intermediate_size is None else self.intermediate_size

    @property
    def attention_dropout(self) -> float | int:
        """Dropout rate on attention probabilities, `hidden_dropout_prob` if `attention_probs_dropout_prob` is None."""
        rate = self.attention_probs_dropout_prob
        return self.hidden_dropout_prob if rate is None else rate

    @property
    def target_vocab_size(self) -> int:
        """Size of the target vocabulary, which is also the source vocabulary."""
        return self.vocab_size


@contextmanager
def convert_config_errors(*, location: object = None, hint: str | None = None) -> Iterator[None]:
    """Convert the error of an invalid configuration in the `with` body to a `CtxError` with the message of the check
    that failed."""
    try:
        yield
    except StrictDataclassError as error:
        raise CtxError(str(error.__cause__ or error), location=location, hint=hint) from error


def _similar_name(name: str, names: Iterable[str]) -> str | None:
    """The field that `name` may be a misspelling of."""
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=_MISSPELLING_RATIO)), None)


def _can_be_set(config_class: type, name: str) -> bool:
    """Whether this attribute can be set on an instance: it is neither a method nor a read-only property."""
    attribute = inspect.getattr_static(config_class, name, None)
    if isinstance(attribute, property):
        return attribute.fset is not None
    return not (callable(attribute) or isinstance(attribute, classmethod | staticmethod))


def is_valid_module_name(name: object) -> bool:
    """Whether a value can name a module in an `nn.ModuleDict`: no dots, and no attribute such as `train`."""
    return isinstance(name, str) and "." not in name and not hasattr(nn.ModuleDict(), name)


def _short_repr(value: Any) -> str:
    """Return a `repr` of bounded length; Python cannot format integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 1000:
        return "a number of more than 1000 bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
