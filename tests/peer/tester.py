"""What the mixins of transformers ask a `model_tester` for, of any model class in the registry."""

import copy
from typing import Any
from unittest import TestCase

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from zoo import CHOICES, STEPS, TINY, Batch, Case, make_batch, make_targets

from hf_ctxmodels.architectures.encoder_decoder import EncoderDecoder
from hf_ctxmodels.spec import Target

BATCH_LENGTHS = (7, 7, 5, 7)  # tokens of the rows; language models, whose labels the mixins put at all, have full rows
LAYERS = 2  # as many as the mixins allow


class ModelTester:
    """Tiny configurations and random batches of one model class, by the names that the mixins use.

    Args:
        parent: The running test.
        case: The model class.
    """

    is_training = True
    batch_size = len(BATCH_LENGTHS)
    seq_length = encoder_seq_length = key_length = max(BATCH_LENGTHS)
    decoder_seq_length = STEPS
    num_hidden_layers = LAYERS
    num_choices = CHOICES
    logits_beside_loss: bool | None = None

    def __init__(self, parent: TestCase, case: Case) -> None:
        self.parent, self.case = parent, case
        config = self.get_config()
        self.expected_num_hidden_layers = config.num_hidden_layers + 1
        for name in ("hidden_size", "num_attention_heads", "vocab_size"):
            if hasattr(config, name):
                setattr(self, name, getattr(config, name))
        if has_attending_decoder(case):  # the mixins give both sides one mask
            self.decoder_seq_length = self.seq_length

    def get_config(self) -> PreTrainedConfig:
        """A configuration. The mixins expect one vocabulary, and hidden states of one width."""
        changes = {"num_hidden_layers": LAYERS, "target_vocab_size": TINY["vocab_size"]}
        changes["return_logits_with_labels"] = self.logits_beside_loss
        if not self.case.attends:
            changes["embedding_size"] = TINY["hidden_size"]
        return self.case.config(**changes)

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, Batch]:
        """A configuration and a batch without targets."""
        full = self.case.model_class.can_generate()
        single = Case(self.case.family, "AutoModel") if self.case.has_choices else self.case
        batch = make_batch(single, [self.seq_length] * self.batch_size if full else BATCH_LENGTHS)
        if "decoder_input_ids" in batch:
            batch["decoder_input_ids"] = batch["decoder_input_ids"].repeat(1, 2)[:, : self.decoder_seq_length]
        return self.get_config(), batch

    def prepare_for_class(self, batch: dict[str, Any], with_targets: bool) -> dict[str, Any]:
        """A copy of a batch, repeated for every choice, with targets where they are asked for. The class of a row is 0,
        since the mixins change the number of classes."""
        batch = copy.deepcopy(batch)
        if self.case.has_choices:
            for name, value in batch.items():
                if torch.is_tensor(value) and value.dim() > 1:
                    batch[name] = value[:, None].repeat(1, CHOICES, *[1] * (value.dim() - 1))
        if not with_targets:
            return batch
        targets = make_targets(self.case, batch)
        rows = [name for name in targets if self.case.targets[name] is Target.SEQUENCE_CLASS]
        return batch | targets | {name: torch.zeros_like(targets[name]) for name in rows}


def has_attending_decoder(case: Case) -> bool:
    """Whether the model has a Transformer's encoder and decoder."""
    return isinstance(case.model().base_model, EncoderDecoder)


def model_classes(case: Case) -> tuple[type[PreTrainedModel], ...]:
    """`all_model_classes` of the mixins: each class has a test class of its own, so that each failure is seen."""
    return (case.model_class,)
