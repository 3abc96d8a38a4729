"""Generation with a state other than a cache of keys and values: a recurrent state, or a memory of segments."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import UnbatchedClassifierFreeGuidanceLogitsProcessor

from hf_ctxmodels.heads.stop_strings import GenerationWithStopStrings


class StatefulGeneration(GenerationWithStopStrings):
    """Generation of a language model with a state.

    Attributes:
        state_outputs: Names of the outputs that are the state.
    """

    state_outputs: ClassVar[tuple[str, ...]] = ("past_key_values",)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the first forward creates the state

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        processors = super()._get_logits_processor(*args, **kwargs)
        for index, processor in enumerate(processors):
            if type(processor) is UnbatchedClassifierFreeGuidanceLogitsProcessor:
                processors[index] = StatefulGuidance(
                    processor.guidance_scale,
                    self,
                    processor.unconditional_context["input_ids"],
                    processor.unconditional_context["attention_mask"],
                    processor.unconditional_context["use_cache"],
                )
        return processors


class StatefulGuidance(UnbatchedClassifierFreeGuidanceLogitsProcessor):
    """Classifier-free guidance (`guidance_scale`) whose inputs `prepare_inputs_for_generation` prepares.

    transformers passes the last token with the mask of all tokens. Under beam search, where it continues from the
    state of another beam, the text is encoded again.
    """

    def get_unconditional_logits(self, input_ids: Tensor) -> Tensor:
        """Return the logits after the negative prompts, repeated for all beams, and the tokens generated so far."""
        context = self.unconditional_context
        if context["first_pass"]:
            ids, mask = context["input_ids"], context["attention_mask"]
            ids = input_ids[:, -1:] if ids is None else ids.repeat_interleave(len(input_ids) // len(ids), 0)
            mask = torch.ones_like(ids) if mask is None else mask.repeat_interleave(len(ids) // len(mask), 0)
            self.negative_ids, self.negative_mask, self.prompt_length = ids, mask, input_ids.shape[1]
            context |= {"first_pass": False, "input_ids": None}
        new_ids = input_ids[:, self.prompt_length :]
        ids = torch.cat([self.negative_ids, new_ids], 1)
        is_continued = context["past_key_values"] is not None and torch.equal(ids[:, :-1], context["input_ids"])
        state = context["past_key_values"] if is_continued else None
        inputs = self.model.prepare_inputs_for_generation(
            ids,
            past_key_values=state,
            attention_mask=torch.cat([self.negative_mask, torch.ones_like(new_ids)], 1),
            use_cache=context["use_cache"],
            next_sequence_length=None if state is None else 1,
        )
        outputs = self.model(**inputs, return_dict=True)
        context |= {"input_ids": ids, "past_key_values": outputs.get(self.model.state_outputs[0])}
        return outputs.logits
