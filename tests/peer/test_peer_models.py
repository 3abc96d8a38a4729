"""`ModelTesterMixin` and `ConfigTester` of transformers over every model class in the registry."""

from typing import Any
from unittest import TestCase

from suite import NoGenerationTests, add_our_classes, peer_module
from tester import ModelTester, has_attending_decoder, model_classes
from zoo import BASES, CASES, Case

COMMON = peer_module("test_modeling_common")
add_our_classes(COMMON)
CONFIGURATION = peer_module("test_configuration_common")


class _Generic(COMMON.ModelTesterMixin):
    """The mixin, with batches and targets of ours; the peer knows those of its own classes by their names."""

    case: Case
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self) -> None:
        self.model_tester = ModelTester(self, self.case)

    def _prepare_for_class(self, inputs_dict: dict[str, Any], model_class: type, return_labels: bool = False) -> Any:
        return self.model_tester.prepare_for_class(inputs_dict, return_labels)

    def test_encoder_decoder_loss_no_double_shift(self) -> None:
        """It differentiates the loss with respect to the logits, which otherwise are not computed beside a loss."""
        self.model_tester.logits_beside_loss = True
        super().test_encoder_decoder_loss_no_double_shift()


def _model_test(case: Case) -> type[TestCase]:
    bases = (_Generic, *([NoGenerationTests] if case.model_class.can_generate() else []), TestCase)
    return type(
        str(case),
        bases,
        {
            "case": case,
            "all_model_classes": model_classes(case),
            "has_attentions": case.attends,
            "is_encoder_decoder": case.writes or has_attending_decoder(case),
            "__module__": __name__,
        },
    )


class _ConfigurationTest:
    case: Case

    def setUp(self) -> None:
        self.model_tester = ModelTester(self, self.case)

    def test_config(self) -> None:
        """`ConfigTester.run_common_tests`."""
        given = {"hidden_size": 960}  # a multiple of every default number of heads
        properties = ["hidden_size", "num_hidden_layers"]
        properties += ["num_attention_heads"] if self.case.attends else []
        tester = CONFIGURATION.ConfigTester(self, self.case.family.config, common_properties=properties, **given)
        tester.run_common_tests()


def _configuration_test(case: Case) -> type[TestCase]:
    return type(f"{case.family.name}-config", (_ConfigurationTest, TestCase), {"case": case, "__module__": __name__})


globals().update({str(case): _model_test(case) for case in CASES})
globals().update({f"{case.family.name}-config": _configuration_test(case) for case in BASES})
