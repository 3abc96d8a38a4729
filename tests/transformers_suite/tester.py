"""`model_tester` for the mixins of transformers, for any model class in the registry."""

import copy
from typing import Any
from unittest import TestCase

import torch
from transformers import PreTrainedConfig
from zoo import CHOICES, STEPS, TINY, Batch, Case, make_batch, make_targets

from hf_ctxmodels.architectures.encoder_decoder import EncoderDecoder
from hf_ctxmodels.spec import Target

BATCH_LENGTHS = (7, 7, 5, 7)  # language models have no padding, since the mixins set labels at all positions
LAYERS = 2  # the maximum that the mixins allow


class ModelTester:
    """Tiny configurations and random batches of a model class, with the interface of the mixins."""

    is_training = True
    batch_size = len(BATCH_LENGTHS)
    seq_length = encoder_seq_length = key_length = max(BATCH_LENGTHS)
    decoder_seq_length = STEPS
    num_hidden_layers = LAYERS
    num_choices = CHOICES
    return_logits_with_labels: bool | None = None

    def __init__(self, parent: TestCase, case: Case) -> None:
        self.parent, self.case = parent, case
        config = self.get_config()
        self.expected_num_hidden_layers = config.num_hidden_layers + 1
        for name in ("hidden_size", "num_attention_heads", "vocab_size"):
            if hasattr(config, name):
                setattr(self, name, getattr(config, name))
        if has_attending_decoder(case):  # the mixins use one mask for encoder and decoder
            self.decoder_seq_length = self.seq_length

    def get_config(self) -> PreTrainedConfig:
        """Configuration with one vocabulary, one number of heads, and one width of embeddings and hidden states, as the
        mixins expect."""
        changes = {"num_hidden_layers": LAYERS, "target_vocab_size": TINY["vocab_size"]}
        changes["decoder_attention_heads"] = TINY["num_attention_heads"]
        changes["return_logits_with_labels"] = self.return_logits_with_labels
        if not self.case.has_attention:
            changes["embedding_size"] = TINY["hidden_size"]
        return self.case.config(**changes)

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, Batch]:
        """Configuration and batch without targets."""
        has_full_sequences = self.case.model_class.can_generate()
        single = Case(self.case.family, "AutoModel") if self.case.has_choices else self.case
        batch = make_batch(single, [self.seq_length] * self.batch_size if has_full_sequences else BATCH_LENGTHS)
        if "decoder_input_ids" in batch:
            batch["decoder_input_ids"] = batch["decoder_input_ids"].repeat(1, 2)[:, : self.decoder_seq_length]
        return self.get_config(), batch

    def prepare_for_class(self, batch: dict[str, Any], with_targets: bool) -> dict[str, Any]:
        """Copy a batch, repeat it per choice, and add targets if requested. Sequence labels are 0, since the mixins
        change the number of classes."""
        batch = copy.deepcopy(batch)
        if self.case.has_choices:
            for name, value in batch.items():
                if torch.is_tensor(value) and value.dim() > 1:
                    batch[name] = value[:, None].repeat(1, CHOICES, *[1] * (value.dim() - 1))
        if not with_targets:
            return batch
        targets = make_targets(self.case, batch)
        sequence_labels = [name for name in targets if self.case.targets[name] is Target.SEQUENCE_CLASS]
        return batch | targets | {name: torch.zeros_like(targets[name]) for name in sequence_labels}


def has_attending_decoder(case: Case) -> bool:
    """Whether the model is a Transformer encoder-decoder."""
    return isinstance(case.model().base_model, EncoderDecoder)
