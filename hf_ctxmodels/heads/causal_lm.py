"""The head for causal language modeling."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.core.caches import PreallocatedCache
from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import host_copy, is_traced, select_true, to_device
from hf_ctxmodels.core.inputs import check_aligned, check_tensors, mask_of_inputs, sequence_numbers
from hf_ctxmodels.heads.base import (
    HeadModel,
    ItemCounts,
    loss_from_logits,
    mask_of_targets,
    validate_targets,
)
from hf_ctxmodels.heads.stop_strings import GenerationWithStopStrings
from hf_ctxmodels.layers.cpu.linear import prepacked_weights


class ForCausalLM(HeadModel, GenerationWithStopStrings):
    """Predicts each token from the tokens before it; `generate` continues a text.

    With `labels`, the encoder's output and the vocabulary's logits are computed for the tokens with a target only, and
    `logits` is None, unless `needs_all_logits`. A family lists `GenerationMixin` among the direct bases of its class,
    as transformers requires.

    Attributes:
        shifts_labels: Whether the head shifts the labels: the label of a token is the target of the token before it.
    """

    output_layer_name: str | None = "lm_head"
    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)
    shifts_labels: ClassVar[bool] = True

    def build_head(self, config: Any) -> None:
        """Create the output layer, without a bias."""
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def is_backward(self) -> bool:
        """Whether the model reads from right to left and predicts each token from the tokens after it."""
        return False

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: ItemCounts = None,
        return_logits: bool | None = None,
        langs: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute logits, or the loss with `labels`. Other arguments as in the encoder's forward.

        Args:
            labels: (batch, length) the tokens themselves, as in transformers, shifted by the head; -100 is ignored. Or
                (batch, length + 1), with the token that follows the row (precedes it, for a backward model), so that
                the last token in reading order has a target as well.
            logits_to_keep: As in transformers: number of last positions with logits, 0 for all, or a tensor of
                positions. The loss does not depend on it.
            kwargs: Arguments of the encoder; and `shift_labels` (batch, length), the target of each token, -100 for
                none, instead of `labels`. It is not a named argument, because Trainer would treat it as labels.
        """
        shift_labels = kwargs.pop("shift_labels", None)
        mask = mask_of_inputs(input_ids, inputs_embeds, attention_mask, past_key_values)
        targets = self.resolve_targets(input_ids, mask, inputs_embeds, labels, shift_labels, sequence_ids)
        computes_logits = targets is None or self.needs_all_logits(return_logits)
        outputs = self.encode_for_targets(
            None if targets is None else mask_of_targets(targets),
            computes_logits,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            sequence_ids=sequence_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **self.extra_ids(langs=langs),
            **kwargs,
        )
        states, loss, logits = outputs.last_hidden_state, None, None
        if computes_logits:
            logits = self.token_logits(slice_logits_to_keep(states, logits_to_keep))
        if targets is not None:
            all_logits = logits if isinstance(logits_to_keep, int) and not logits_to_keep else None
            if computes_logits and all_logits is None:
                outputs.last_hidden_state = select_true(states, mask_of_targets(targets))
            loss = self.next_token_loss(outputs, targets, num_items_in_batch, all_logits)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.get("attentions"),
        )

    def resolve_targets(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor | None:
        """(batch, length) target of each token, -100 for none; None without labels. Arguments as in `forward`."""
        shape = self.input_shape(input_ids, inputs_embeds)
        check_tensors(labels=labels, shift_labels=shift_labels)
        if shape is None:
            return None  # the encoder raises the error
        if shift_labels is not None:
            return validate_targets(shift_labels, "shift_labels", shape)
        if labels is None:
            return None
        batch_size, length = shape
        labels = validate_targets(labels, "labels", shape, (batch_size, length + 1))
        attention_mask = None if isinstance(attention_mask, BlockMask) else attention_mask
        if not is_traced(labels):
            check_aligned({"attention_mask": attention_mask, "sequence_ids": sequence_ids}, batch_size, length)
        return next_token_targets(labels, length, attention_mask, sequence_ids, self.is_backward)

    def encode_for_targets(self, target_mask: Tensor | None, computes_logits: bool, **inputs: Any) -> Any:
        """Run the encoder. `last_hidden_state` is (batch, length, hidden) if `computes_logits`, else (targets, hidden)
        at the tokens of the (batch, length) bool `target_mask`, which is None without labels."""
        return self.encode(output_mask=None if computes_logits else target_mask, **inputs)

    def next_token_loss(
        self, outputs: Any, targets: Tensor, num_items: ItemCounts, logits: Tensor | None = None
    ) -> Tensor:
        """Mean cross-entropy in nats per (batch, length) target, the logarithm of the perplexity.

        It is computed from the (batch, length, vocabulary) `logits`, or from a (targets, hidden) `last_hidden_state`.
        """
        if logits is not None:
            return loss_from_logits(logits, targets, num_items)
        return self.token_loss(outputs.last_hidden_state, targets, num_items)

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> None:
        if getattr(self.config, "prefix_lm", False):
            if generation_config.prefill_chunk_size is not None:
                raise CtxError(
                    "A prefix LM encodes a prompt in one piece.", hint="set prefill_chunk_size=None to generate."
                )
            model_kwargs["prefix_mask"] = model_kwargs["attention_mask"]
            if model_kwargs["prefix_mask"] is None:  # transformers drops a mask without padding
                batch_size = args[1] * max(
                    generation_config.num_beams or 1, generation_config.num_return_sequences or 1
                )
                shape = batch_size, generation_config._mask_length
                model_kwargs["prefix_mask"] = torch.ones(shape, dtype=torch.long, device=self.device)
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        cache: Any = model_kwargs.get("past_key_values")
        if type(cache) is DynamicCache and not cache.offloading and not hasattr(cache, "_is_user_defined"):
            model_kwargs["past_key_values"] = PreallocatedCache(config=self.config)

    def reference_config(self) -> dict[str, Any]:
        """Return the configuration of the class in transformers; raise CtxError for a prefix LM."""
        if getattr(self.config, "prefix_lm", False):
            raise CtxError("transformers does not generate with a prefix (prefix_lm).", hint="use save_pretrained.")
        return super().reference_config()

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        *,
        inputs_embeds: Tensor | None = None,
        prefix_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The arguments of a forward pass; `prefix_mask` (batch, prompt) is used for the first one, or for all without
        a cache. transformers requires `inputs_embeds` among the named arguments."""
        inputs = super().prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)
        cache = inputs.get("past_key_values")
        if prefix_mask is not None and (cache is None or not cache.get_seq_length()):
            tokens = inputs["input_ids"] if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"]
            inputs["prefix_mask"] = F.pad(prefix_mask, (0, tokens.shape[1] - prefix_mask.shape[1]))
        return inputs

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Generate as in transformers, after the last token of each row, wherever the padding is (`attention_mask` 0).

        transformers continues after the last column, which is padding in a row with right padding. The prompts are
        (batch, length) `inputs` or `input_ids`, which are returned unchanged, or (batch, length, hidden)
        `inputs_embeds`.
        """
        with prepacked_weights(self.prepacked_bytes):
            input_ids: Any = kwargs.get("input_ids") if inputs is None else inputs
            prompt = kwargs.get("inputs_embeds") if input_ids is None else input_ids
            mask: Any = kwargs.get("attention_mask")
            has_mask = isinstance(prompt, Tensor) and isinstance(mask, Tensor) and mask.shape == prompt.shape[:2]
            if not has_mask or not bool((mask[:, -1] == 0).any()):
                return super().generate(inputs, *args, **kwargs)
            order = torch.argsort((mask != 0).long(), dim=1, stable=True)
            if input_ids is not None:
                kwargs["input_ids"] = input_ids
            for name, value in kwargs.items():
                if isinstance(value, Tensor) and value.shape == order.shape:
                    kwargs[name] = value.gather(1, order.to(value.device))
                elif name == "inputs_embeds" and isinstance(value, Tensor) and value.shape[:2] == order.shape:
                    kwargs[name] = value.gather(1, order[..., None].expand_as(value))
            outputs: Any = super().generate(None, *args, **kwargs)
            if input_ids is None:  # only new tokens are returned
                return outputs
        sequences = outputs if isinstance(outputs, Tensor) else outputs.sequences
        prompts = input_ids.repeat_interleave(len(sequences) // len(input_ids), 0)
        sequences[:, : prompts.shape[1]] = prompts
        return outputs


def next_token_targets(
    labels: Tensor, length: int, attention_mask: Tensor | None, sequence_ids: Tensor | None, backward: bool = False
) -> Tensor:
    """(batch, length) target of each token, the next token in reading order; -100 for none.

    Tokens at padding positions and at the end of a sequence have no target if labels are (batch, length). Labels of
    shape (batch, length + 1) are used without change.
    """
    device, labels = labels.device, host_copy(labels)
    mask = None if attention_mask is None else host_copy(attention_mask)
    sequences = None if sequence_ids is None else host_copy(sequence_ids)
    if backward:
        mask, sequences = (None if tensor is None else tensor.flip(1) for tensor in (mask, sequences))
        return to_device(next_token_targets(labels.flip(1), length, mask, sequences).flip(1), device)
    if labels.shape[1] == length + 1:
        return to_device(labels[:, 1:], device)
    shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    if mask is not None:
        shifted = shifted.masked_fill(mask == 0, IGNORE_INDEX)
    if sequences is not None:
        numbers = sequence_numbers(sequences)
        ends = F.pad(numbers[:, 1:] != numbers[:, :-1], (0, 1), value=True)
        shifted = shifted.masked_fill(ends | (sequences == 0), IGNORE_INDEX)
    return to_device(shifted, device)
