"""The model base every family derives from: checked input, layouts, native saving, export to the reference layout."""

import functools
import json
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.output_capturing import capture_outputs

from hf_ctxmodels.core.code_copy import InstalledCode
from hf_ctxmodels.core.config import CtxConfig
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.attention.layouts import Layout, PackedLayout, PaddedLayout, check_row_lengths


class CtxPreTrainedModel(InstalledCode, PreTrainedModel):
    """What all families share.

    Attributes:
        id_axes: Names of the axes that the ids of a single token have; none where a token is one integer.
        id_limit: The configuration's field that every id is below.
        loss_targets: The `forward` arguments a head's loss is computed from, one per term. Every head divides a term's
            sum by the number of its targets; `num_items_in_batch` may give these numbers for a larger batch.
        reference_model_type: `model_type` of the reference implementation in transformers; None where there is none.
        reference_architecture: Name of the reference's class where it is not this one's without its prefix.
        export_conversion: The invertible part of the family's conversion table.
    """

    config: CtxConfig
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    id_axes: ClassVar[tuple[str, ...]] = ()  # of a token's own, behind (batch, length)
    id_limit: ClassVar[str] = "vocab_size"
    loss_targets: ClassVar[tuple[str, ...]] = ()
    reference_model_type: ClassVar[str | None] = None
    reference_architecture: ClassVar[str | None] = None
    export_conversion: ClassVar[list[WeightTransform]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Take the most derived configuration among the bases: transformers takes the first base's, which for a mixin
        of several families is a general one."""
        super().__init_subclass__(**kwargs)
        known = [getattr(base, "config_class", None) for base in cls.__bases__]
        cls.config_class = max([cls.config_class, *filter(None, known)], key=lambda config: len(config.__mro__))

    def load_pretrained_parts(self, missing: Container[str] | None = None) -> None:
        """Copy what the configuration takes from other models, for example word vectors: for families that take any.

        It is a step of its own after a new model was made or a checkpoint without these parts was opened; neither a
        configuration nor the initialisation of weights opens another model.

        Args:
            missing: Names of the parameters that a checkpoint lacked; None for a new model, where all are to be filled.

        Raises:
            CtxError: A source cannot be opened, or does not fit.
        """

    def has_inplace_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a head, given a `learning_rate`, does the work of this optimizer by itself: no backward pass."""
        return False

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Open a directory or Hub id, as every model does. What a module names in `fixed_parameters` stays fixed, where
        transformers would make every weight it reads a parameter to be trained."""
        opened = super().from_pretrained(*args, **kwargs)
        model = opened[0] if isinstance(opened, tuple) else opened
        for module in model.modules():
            for name in getattr(module, "fixed_parameters", ()):
                getattr(module, name).requires_grad_(False)
        return opened

    def save_pretrained(self, save_directory: str | Path, save_original_format: bool = False, **kwargs: Any) -> None:
        """Save in the native layout.

        transformers reverses conversion tables on save by default, and Trainer's resume then finds no native key and
        silently goes on from random weights; `export_reference` is the way to the reference layout.
        """
        super().save_pretrained(save_directory, save_original_format=save_original_format, **kwargs)

    def export_reference(self, save_directory: str | Path) -> None:
        """Write weights and a config.json that the reference class in transformers opens, bit for bit.

        Args:
            save_directory: Folder to write config.json and model.safetensors to; created if needed.

        Raises:
            CtxError: transformers has no such model.
        """
        if self.reference_model_type is None:
            raise CtxError(f"transformers has no peer of {type(self).__name__}.", hint="use save_pretrained.")
        config = self.reference_config()  # first: a family may refuse what its reference cannot hold
        loaded_with = getattr(self, "_weight_conversions", None)
        self._weight_conversions: Any = self.export_conversion
        try:
            super().save_pretrained(save_directory, save_original_format=True)
        finally:
            self._weight_conversions = loaded_with
        path = Path(save_directory) / "config.json"
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def reference_config(self) -> dict[str, Any]:
        """This model's configuration as the reference class reads it."""
        values = self.config.to_diff_dict()
        for own in (*self.config.own_fields, "auto_map"):
            values.pop(own, None)
        values = {self.config.reference_name(name): value for name, value in values.items()}
        values["model_type"] = self.reference_model_type
        values["architectures"] = [self.reference_architecture or type(self).__name__.removeprefix("Ctx")]
        return values

    def check_encoder_input(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        max_length: int | None,
        *,
        sequence_ids: Tensor | None = None,
        output_mask: Tensor | None = None,
        **aligned: Tensor | None,
    ) -> Tensor:
        """Refuse what would fail deep inside or, on a GPU, take the device down.

        Args:
            input_ids: (batch, length, *id_axes), or None with `inputs_embeds` (batch, length, hidden).
            attention_mask: (batch, length) or a ready 4-D mask.
            max_length: Longest sequence the model can take; None sets no limit.
            sequence_ids: (batch, length), 0 at padding.
            wanted: (batch, length), the positions whose outputs are wanted.
            aligned: Other (batch, length) tensors by their argument name.

        Returns:
            What is to be encoded: the ids (batch, length), or the embeddings (batch, length, hidden).

        Raises:
            CtxError: Naming the argument, what it is and what was expected.
        """
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None or (input_ids is not None and inputs_embeds is not None):
            raise CtxError("Give exactly one of input_ids and inputs_embeds.")
        axes = ", ".join(("batch", "length", *self.id_axes))
        if given.dim() != (2 + len(self.id_axes) if input_ids is not None else 3):
            raise CtxError(
                f"input_ids must be ({axes}), inputs_embeds (batch, length, hidden); got {tuple(given.shape)}."
            )
        batch_size, length = given.shape[:2]
        if not batch_size or not length:
            raise CtxError(
                f"The batch is empty: shape {tuple(given.shape)}. Drop empty batches and texts without tokens."
            )
        if max_length is not None and length > max_length:
            raise CtxError(
                f"The sequence has {length} tokens, this model takes at most {max_length} "
                f"(max_position_embeddings={self.config.max_position_embeddings}); "
                f"truncate it (tokenizer(..., truncation=True, max_length={max_length})) or split it into windows."
            )
        padding_mask = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
        aligned |= {"attention_mask": padding_mask, "sequence_ids": sequence_ids, "output_mask": output_mask}
        for name, tensor in aligned.items():
            shapes = [(batch_size, length), (1, length)] if name == "position_ids" else [(batch_size, length)]
            if tensor is not None and tuple(tensor.shape) not in shapes:
                raise CtxError(f"{name} is {tuple(tensor.shape)}, but the input is ({batch_size}, {length}).")
        if input_ids is not None:
            check_ids("input_ids", input_ids, getattr(self.config, self.id_limit), self.id_limit)
        if output_mask is not None and not is_traced(output_mask):
            for name, tokens in {"attention_mask": padding_mask, "sequence_ids": sequence_ids}.items():
                if tokens is not None and bool((misplaced := output_mask & (tokens == 0)).any()):
                    raise CtxError(
                        f"{int(misplaced.sum())} of the labels other than -100 stand where {name} is 0 (padding), the "
                        f"first at {misplaced.nonzero()[0].tolist()}; labels and {name} do not belong together."
                    )
        return given

    def check_word_input(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        width: int | None = None,
        /,
        **aligned: Tensor | None,
    ) -> Tensor:
        """`check_encoder_input` of encoders without attention: any length, and a mask of two dimensions.

        Args:
            width: Of embeddings; None for `config.embedding_size`.

        Raises:
            CtxError: As there, or a mask that is not (batch, length), or embeddings of another width.
        """
        given = self.check_encoder_input(input_ids, inputs_embeds, attention_mask, None, **aligned)
        if attention_mask is not None and attention_mask.dim() != 2:
            raise CtxError(f"attention_mask must be (batch, length); got {tuple(attention_mask.shape)}.")
        width = getattr(self.config, "embedding_size", None) if width is None else width
        if inputs_embeds is not None and inputs_embeds.shape[2] != width:
            raise CtxError(f"inputs_embeds is {tuple(inputs_embeds.shape)}, expected width {width}.")
        return given

    def encoder_layout(
        self, words: Tensor, attention_mask: Tensor | None, sequence_ids: Tensor | None, **kwargs: Any
    ) -> Layout:
        """Choose how the encoder lays out its tokens: packed where that is exact, padded otherwise.

        Padded are: `config.unpad=False`, implementations other than sdpa, masks that are not (batch, length), asked-for
        attention weights, and graphs being traced, where packed lengths would be data-dependent shapes.

        Args:
            words: (batch, length) ids or (batch, length, hidden) embeddings.
            attention_mask: (batch, length) or a ready mask of the implementation in use.
            sequence_ids: (batch, length), 0 at padding, or None.
            kwargs: Passed on to the attention function.
        """
        padding_only = attention_mask is None or (torch.is_tensor(attention_mask) and attention_mask.dim() == 2)
        wants_weights = kwargs.get("output_attentions") or self.config.output_attentions
        exact = padding_only and self.config._attn_implementation == "sdpa" and not wants_weights
        if self.config.unpad and exact and not is_traced(words):
            return PackedLayout.build(words.shape[0], words.shape[1], attention_mask, sequence_ids, words.device)
        same_sequence = None
        if sequence_ids is not None:
            tokens = (sequence_ids != 0).long()
            attention_mask = tokens if attention_mask is None else attention_mask * tokens
            same_sequence = _same_sequence(sequence_numbers(sequence_ids))
        first = None
        if padding_only and attention_mask is not None:
            tokens = attention_mask != 0
            if not is_traced(words):
                check_row_lengths(tokens.sum(1))
            first = tokens.int().argmax(1)
        like = torch.empty(*words.shape[:2], 0, dtype=self.dtype, device=words.device)
        mask = create_bidirectional_mask(self.config, like, attention_mask, and_mask_function=same_sequence)
        return PaddedLayout(mask, kwargs, first)


class RecordedLayout(Protocol):
    """What an encoder computed on, and how to undo it."""

    def recorded(self, states: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """What was recorded in front of every layer, and the encoder's output -> what leaves the encoder."""


@dataclass
class EncoderOutput(BaseModelOutputWithPooling):
    """Output of an encoder; `layout` is for `capture_unpacked_outputs`, which removes it."""

    layout: RecordedLayout | None = None


def default_positions(words: Tensor, position_ids: Tensor | None, sequence_ids: Tensor | None) -> Tensor:
    """(batch, length) positions: those given, else counted within each sequence of a row, else the columns."""
    batch_size, length = words.shape[:2]
    if position_ids is None:
        columns = torch.arange(length, device=words.device)[None]
        if sequence_ids is None:
            position_ids = columns
        else:
            position_ids = columns - (columns * _sequence_starts(sequence_ids)).cummax(1).values
    return position_ids.expand(batch_size, length)


def _sequence_starts(sequence_ids: Tensor) -> Tensor:
    """(batch, length) bool: where a run of equal ids starts. A run is a sequence, whatever its number elsewhere."""
    starts = torch.ones_like(sequence_ids, dtype=torch.bool)
    starts[:, 1:] = sequence_ids[:, 1:] != sequence_ids[:, :-1]
    return starts


def sequence_numbers(sequence_ids: Tensor) -> Tensor:
    """(batch, length) ids of sequences, -> their runs numbered within each row; padding counts as one."""
    return _sequence_starts(sequence_ids).cumsum(1)


def check_ids(name: str, ids: Tensor | None, limit: int, limit_name: str) -> None:
    """Raise if an id is outside [0, limit), naming the first one. Skipped while a graph is being traced.

    Raises:
        CtxError: The argument, the id, where it stands and the limit.
    """
    if ids is None or is_traced(ids):
        return
    low, high = torch.aminmax(ids)
    if int(low) >= 0 and int(high) < limit:
        return
    place = ((ids < 0) | (ids >= limit)).nonzero()[0].tolist()
    raise CtxError(
        f"{name}{place} is {int(ids[tuple(place)])}, outside [0, {limit_name}={limit}).",
        hint="give ids that this model's own tokenizer makes; if tokens were added to it, call "
        "model.resize_token_embeddings(len(tokenizer)).",
    )


def capture_unpacked_outputs(forward: Callable) -> Callable:
    """`capture_outputs` of transformers, with recorded hidden states padded back when the encoder ran packed.

    The wrapped forward leaves the layout it used on its output, as `outputs.layout`.
    """
    captured = capture_outputs(forward)

    @functools.wraps(forward)
    def wrapper(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return_dict = kwargs.pop("return_dict", self.config.return_dict)
        outputs = captured(self, *args, return_dict=True, **kwargs)
        layout = outputs.layout
        found = {name: value for name, value in outputs.items() if name != "layout"}
        if found.get("hidden_states") is not None:
            found["hidden_states"] = layout.recorded(found["hidden_states"])
        outputs = type(outputs)(**found)
        return outputs if return_dict is not False else outputs.to_tuple()

    return wrapper


def _same_sequence(numbers: Tensor) -> Callable:
    def mask_function(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return numbers[batch, query] == numbers[batch, key]

    return mask_function


def is_traced(tensor: Tensor) -> bool:
    """Whether values cannot be looked at: a graph is being compiled or traced, or there are none."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or tensor.device.type == "meta"
