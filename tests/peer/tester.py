"""What the mixins of transformers ask a `model_tester` for, of any model class in the registry."""

import copy
from typing import Any
from unittest import TestCase

from transformers import PreTrainedConfig, PreTrainedModel
from zoo import STEPS, Batch, Case, make_batch, make_targets

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

    def __init__(self, parent: TestCase, case: Case) -> None:
        self.parent, self.case = parent, case
        config = self.get_config()
        for name in ("hidden_size", "num_attention_heads", "vocab_size"):
            if hasattr(config, name):
                setattr(self, name, getattr(config, name))

    def get_config(self) -> PreTrainedConfig:
        """A configuration."""
        return self.case.config(num_hidden_layers=LAYERS)

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, Batch]:
        """A configuration and a batch without targets."""
        full = self.case.model_class.can_generate()
        return self.get_config(), make_batch(self.case, [self.seq_length] * self.batch_size if full else BATCH_LENGTHS)

    def prepare_for_class(self, batch: dict[str, Any], with_targets: bool) -> dict[str, Any]:
        """A copy of a batch, with targets where they are asked for."""
        batch = copy.deepcopy(batch)
        return batch | make_targets(self.case, batch) if with_targets else batch


def model_classes(case: Case) -> tuple[type[PreTrainedModel], ...]:
    """`all_model_classes` of the mixins: each class has a test class of its own, so that each failure is seen."""
    return (case.model_class,)
