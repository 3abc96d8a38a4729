"""`ModelTesterMixin` and `ConfigTester` of transformers for all model classes in the registry."""

from typing import Any
from unittest import TestCase

from suite import NoGenerationTests, import_test_module, register_model_classes
from tester import ModelTester, has_attending_decoder
from zoo import BASES, CASES, Case

COMMON = import_test_module("test_modeling_common")
register_model_classes(COMMON)
CONFIGURATION = import_test_module("test_configuration_common")


class _ModelTests(COMMON.ModelTesterMixin):
    """The mixin with batches and targets of this package, since transformers selects targets by class name."""

    case: Case
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self) -> None:
        self.model_tester = ModelTester(self, self.case)

    def _prepare_for_class(self, inputs_dict: dict[str, Any], model_class: type, return_labels: bool = False) -> Any:
        return self.model_tester.prepare_for_class(inputs_dict, return_labels)

    def test_encoder_decoder_loss_no_double_shift(self) -> None:
        """The test needs the logits together with the loss."""
        self.model_tester.return_logits_with_labels = True
        super().test_encoder_decoder_loss_no_double_shift()


def _model_test(case: Case) -> type[TestCase]:
    bases = (_ModelTests, *([NoGenerationTests] if case.model_class.can_generate() else []), TestCase)
    attributes = {"case": case, "all_model_classes": (case.model_class,), "has_attentions": case.has_attention}
    attributes["is_encoder_decoder"] = case.is_seq2seq or has_attending_decoder(case)
    return type(str(case), bases, attributes | {"__module__": __name__})


class _ConfigurationTest:
    case: Case

    def setUp(self) -> None:
        self.model_tester = ModelTester(self, self.case)

    def test_config(self) -> None:
        """`ConfigTester.run_common_tests`."""
        options = {"hidden_size": 960}  # a multiple of all default numbers of heads
        properties = ["hidden_size", "num_hidden_layers"]
        properties += ["num_attention_heads"] if self.case.has_attention else []
        tester = CONFIGURATION.ConfigTester(self, self.case.family.config, common_properties=properties, **options)
        tester.run_common_tests()


def _configuration_test(case: Case) -> type[TestCase]:
    return type(f"{case.family.name}-config", (_ConfigurationTest, TestCase), {"case": case, "__module__": __name__})


globals().update({str(case): _model_test(case) for case in CASES})
globals().update({f"{case.family.name}-config": _configuration_test(case) for case in BASES})
