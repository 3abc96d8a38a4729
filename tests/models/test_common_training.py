"""All heads: loss, gradients, gradient accumulation and learning.

Cases and fixtures: tests/zoo/matrix.py, tests/models/conftest.py.
"""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from zoo import (
    ARCHETYPES,
    CLS,
    FIRST_WORD,
    HEADS,
    NETWORKS,
    REPRESENTATIVES,
    Batch,
    Case,
    as_subtests,
    assert_close,
    assert_nonzero_gradients,
    assert_same_gradients,
    gradients,
    labeled_batch,
    make_batch,
    make_targets,
    make_training_batch,
    models_by_fast_path,
    parametrize_forwards,
    scalar_loss,
    tensors_of,
)

from hf_ctxmodels import CtxError
from hf_ctxmodels.spec import Target

CHECKPOINTING_NETWORKS = [case for case in NETWORKS if case.model_class.supports_gradient_checkpointing]
CHECKPOINTING_HEADS = [case for case in HEADS if case.model_class.supports_gradient_checkpointing]
NOT_REENTRANT = ("bart", "mass", "t5")
DROPOUT_CASES = [case for case in [*NETWORKS, *ARCHETYPES] if case.has_field("hidden_dropout_prob")]
SEQUENCE_CLASSIFIERS = [case for case in REPRESENTATIVES if case.auto_name == "AutoModelForSequenceClassification"]


def full_logits(case: Case, model: torch.nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Map each target's name to the logits it is compared with, from a forward pass without targets."""
    outputs = tensors_of(model(**batch))
    main_logits = "logits" if "logits" in outputs else "prediction_logits"
    if case.detects_replaced_tokens:  # binary cross-entropy is cross-entropy with a second logit of zero
        outputs[main_logits] = torch.stack([torch.zeros_like(outputs[main_logits]), outputs[main_logits]], -1)
    fields = {"start_positions": "start_logits", "end_positions": "end_logits"} | dict(case.model_class.logits_fields)
    logits = {}
    for target in case.compared_targets:
        field = fields.get(target, target.replace("labels", "logits"))
        logits[target] = outputs.get(field, outputs.get(main_logits))
    return logits


def count_targets(targets: Batch) -> dict[str, Tensor]:
    return {name: (target != -100).sum() for name, target in targets.items()}


def _returns_loss_components(case: Case) -> bool:
    has_several_targets = len(case.model_class.loss_targets) > 1
    return has_several_targets and (case.auto_name == "AutoModelForPreTraining" or case.has_consistency_loss)


def _returns_metrics(case: Case) -> bool:
    if case.detects_replaced_tokens:
        return True
    has_classifier = not case.is_seq2seq or Target.PAIR_CLASS in case.targets.values()
    return _returns_loss_components(case) and has_classifier


class TestLoss:
    @as_subtests([case for case in HEADS if not (case.has_generator or case.trains_static_embeddings)], "head")
    def test_loss_is_cross_entropy_of_full_logits(self, head: Case) -> None:
        """The loss of heads whose logits do not depend on the targets."""
        model = head.model()
        batch = make_batch(head, side="left")
        targets = make_targets(head, batch, ignore_some=True)
        targets = {name: targets[name] for name in head.compared_targets}
        losses = []
        for name, logits in full_logits(head, model, batch).items():
            if name.endswith("_positions"):  # padding is excluded
                logits = logits.masked_fill(batch["attention_mask"] == 0, float("-inf"))
            labels = targets[name][:, 1:] if head.shifts_labels else targets[name]
            losses.append(F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100))
        expected = torch.stack(losses)
        expected = expected.mean() if "start_positions" in targets else expected.sum()
        actual = model(**batch, **targets).loss
        assert_close(actual, expected)
        assert_same_gradients(gradients(model, actual), gradients(model, expected))

    @parametrize_forwards
    def test_outputs_with_and_without_targets(self, head_case: Case) -> None:
        """With targets: the loss is the sum of its components, no vocabulary logits, metrics of classifications.
        Without targets: no loss."""
        batch, model = make_batch(head_case), head_case.model()
        assert model(**batch).loss is None
        targets = make_targets(head_case, batch)
        ignored_loss = model(**batch, **{name: torch.full_like(target, -100) for name, target in targets.items()}).loss
        assert ignored_loss == 0, "a micro-batch without masked tokens"
        assert not any(gradient.any() for gradient in gradients(model, ignored_loss).values()), "gradients must be zero"
        outputs = model(**batch, **targets)
        logits = [name for name in tensors_of(outputs) if name in ("logits", "prediction_logits")]
        assert bool(logits) == (not head_case.computes_logits_of_labels_only and "start_logits" not in outputs)
        assert bool(outputs.get("metrics")) == _returns_metrics(head_case)
        terms = [head_case.loss_weight(name) * value for name, value in outputs.items() if name.endswith("_loss")]
        assert len(terms) == (len(head_case.model_class.loss_targets) if _returns_loss_components(head_case) else 0)
        assert not any(term.requires_grad for term in terms)
        if terms:
            assert_close(sum(terms), outputs.loss.detach())

    @pytest.mark.parametrize("head_case", [case for case in HEADS if case.accepts_return_logits], ids=str)
    def test_logits_with_labels(self, head_case: Case) -> None:
        """All logits and the same loss: by argument, by configuration, and by default in evaluation without
        gradients."""
        batch, model = make_batch(head_case), head_case.model()
        targets = make_targets(head_case, batch, ignore_some=True)
        expected, without_labels = model(**batch, **targets), model(**batch)
        name = "logits" if "logits" in without_labels else "prediction_logits"
        outputs_with_logits = [model(**batch, **targets, return_logits=True)]
        with torch.no_grad():
            outputs_with_logits.append(model(**batch, **targets))
            assert model(**batch, **targets, return_logits=False).get(name) is None
        model.config.return_logits_with_labels = True
        outputs_with_logits.append(model(**batch, **targets))
        for outputs in outputs_with_logits:
            assert_close(outputs.loss, expected.loss, "loss")
            if not head_case.has_generator:  # the logits of a discriminator depend on the generator's samples
                assert_close(outputs[name], without_labels[name], name)
        gradients_without = gradients(model, expected.loss)
        assert_same_gradients(gradients(model, outputs_with_logits[-1].loss), gradients_without)
        model.train()
        with torch.no_grad():
            model.config.return_logits_with_labels = None
            assert model(**batch, **targets).get(name) is None
        assert model(**batch, **targets, return_logits=True)[name].shape == outputs_with_logits[0][name].shape

    @pytest.mark.parametrize("head_case", [case for case in REPRESENTATIVES if _returns_metrics(case)], ids=str)
    def test_metric_counts_add_up_over_microbatches(self, head_case: Case) -> None:
        batch = labeled_batch(head_case, ignore_some=True)
        model, num_rows = head_case.model(), len(batch["input_ids"])
        batch_metrics = model(**batch).metrics
        parts = [{name: value[part] for name, value in batch.items()} for part in (slice(0, 1), slice(1, num_rows))]
        part_metrics = [model(**part).metrics for part in parts]
        assert batch_metrics
        for name, counts in batch_metrics.items():
            assert not counts.requires_grad
            assert 0 <= counts[0] <= counts[1]
            assert_close(sum(metrics[name] for metrics in part_metrics), counts, name)

    @pytest.mark.parametrize("case", SEQUENCE_CLASSIFIERS, ids=str)
    def test_regression_and_multi_label_classification(self, case: Case) -> None:
        batch = make_batch(case)
        scores, multi_labels = torch.randn(4, 3), torch.randint(2, (4, 3)).float()
        for problem_type, labels, loss_fn in (
            ("regression", scores, F.mse_loss),
            ("multi_label_classification", multi_labels, F.binary_cross_entropy_with_logits),
        ):
            model = case.model(problem_type=problem_type)
            assert_close(model(**batch, labels=labels).loss, loss_fn(model(**batch).logits, labels), problem_type)


class TestAccumulation:
    """A batch of 16 examples equals 4 microbatches of 4 examples with different numbers of targets."""

    LENGTHS = (12, 3, 9, 1, 2, 2, 1, 5, 12, 12, 12, 12, 4, 6, 1, 8)

    def _batch_and_microbatches(self, head: Case) -> tuple[Batch, Batch, list[tuple[Batch, Batch]]]:
        batch = make_batch(head, self.LENGTHS)
        targets = make_targets(head, batch)
        for name, target in targets.items():
            if target.dim() == 1 and not name.endswith("_positions"):
                target[[0, 1, 2, 5, 13]] = -100
        microbatches = [
            tuple({name: value[start : start + 4] for name, value in source.items()} for source in (batch, targets))
            for start in range(0, 16, 4)
        ]
        return batch, targets, microbatches

    def _assert_microbatches_match(self, head: Case, *num_items: Mapping[str, Tensor | int] | Tensor | int) -> None:
        """Compare the batch with its microbatches for each value of `num_items_in_batch`."""
        batch, targets, microbatches = self._batch_and_microbatches(head)
        model = head.model()
        loss = model(**batch, **targets).loss
        expected = gradients(model, loss)
        for counts in num_items:
            losses = [model(**inputs, **labels, num_items_in_batch=counts).loss for inputs, labels in microbatches]
            assert_close(torch.stack(losses).sum(), loss, f"loss with {counts}")
            assert_same_gradients(gradients(model, torch.stack(losses).sum()), expected, where=f"with {counts}")

    @parametrize_forwards
    def test_num_items_for_each_target(self, head_case: Case) -> None:
        _, targets, microbatches = self._batch_and_microbatches(head_case)
        counts = count_targets(targets)
        if "labels" in counts:
            assert len({int(count_targets(labels)["labels"]) for _, labels in microbatches}) > 1
        self._assert_microbatches_match(head_case, counts, {name: int(count) for name, count in counts.items()})

    @as_subtests([head for head in HEADS if head not in REPRESENTATIVES], "head")
    def test_all_parameters_have_gradients(self, head: Case) -> None:
        """Representative heads are tested on all attention paths in test_common_layouts.py."""
        batch, targets, _ = self._batch_and_microbatches(head)
        model = head.model()
        if getattr(model.config, "eos_token_id", None) == CLS:  # sequence classifiers use its state
            batch["input_ids"] = batch["input_ids"].masked_fill(batch["input_ids"] == CLS, FIRST_WORD)
        assert_nonzero_gradients(model, gradients(model, model(**batch, **targets).loss), where=str(head))

    def test_single_num_items_as_in_trainer(self, archetype_case: Case) -> None:
        counts = count_targets(self._batch_and_microbatches(archetype_case)[1])
        assert archetype_case.model_class.accepts_loss_kwargs is (len(counts) == 1)
        if len(counts) == 1:
            (count,) = counts.values()
            self._assert_microbatches_match(archetype_case, count, int(count))

    def test_mean_over_processes(self, archetype_case: Case) -> None:
        """DDP averages gradients over P processes; counts / P makes the average the global mean."""
        batch, targets, microbatches = self._batch_and_microbatches(archetype_case)
        model = archetype_case.model()
        counts = {name: count / 4 for name, count in count_targets(targets).items()}
        losses = [model(**inputs, **labels, num_items_in_batch=counts).loss for inputs, labels in microbatches]
        assert_close(torch.stack(losses).mean(), model(**batch, **targets).loss)


class TestGradients:
    @pytest.mark.parametrize("network_case", CHECKPOINTING_NETWORKS, ids=str)
    def test_gradient_checkpointing_is_bitwise_equal(self, network_case: Case) -> None:
        """With dropout and `output_hidden_states`."""
        batch = labeled_batch(network_case)
        results = []
        for checkpointing in (False, True):
            model = network_case.model(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2).train()
            if checkpointing:
                model.activation_checkpointing_enable()
                assert model.is_activation_checkpointing
            torch.manual_seed(7)
            loss = scalar_loss(network_case, model, batch, output_hidden_states=True)
            results.append((loss.detach(), gradients(model, loss)))
        assert_close(*results, tolerance=0)

    @as_subtests([case for case in CHECKPOINTING_HEADS if case in REPRESENTATIVES or case.family.name in NOT_REENTRANT])
    def test_reentrant_checkpointing(self, case: Case) -> None:
        """Raises for layers with encoder states or a learned position bias as input."""
        model = case.model().train()
        if case.family.name in NOT_REENTRANT:
            with pytest.raises(CtxError, match=r"(?s)a re-entrant checkpoint loses.*use_reentrant=True"):
                model.activation_checkpointing_enable({"use_reentrant": True})
            assert not model.is_activation_checkpointing
            return
        batch = labeled_batch(case)
        results = []
        for reentrant in (False, True):
            if reentrant:
                model.activation_checkpointing_enable({"use_reentrant": True})
            torch.manual_seed(7)
            results.append(gradients(model, model(**batch).loss))
        assert_same_gradients(*reversed(results))

    @pytest.mark.parametrize("case", DROPOUT_CASES, ids=str)
    def test_dropout_is_active_only_in_training(self, case: Case) -> None:
        batch = make_batch(case)
        model = case.model(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3, dropout_scale=1.0)
        first, second = tensors_of(model(**batch)), tensors_of(model(**batch))
        model.train()
        training_outputs = tensors_of(model(**batch))
        assert first
        for name, value in first.items():
            assert torch.equal(value, second[name])
            assert not torch.allclose(value, training_outputs[name])

    def test_attention_dropout_preserves_mean(self, attention_case: Case) -> None:
        """The mean output over many dropout masks is close to the output without dropout."""
        batch = make_batch(attention_case, (8, 5))
        repeated = {name: tensor.repeat(200, 1) for name, tensor in batch.items()}
        num_attentions = 3 if attention_case.is_encoder_decoder else 1  # dropout of each adds to the error
        for path, model in models_by_fast_path(
            attention_case, attention_probs_dropout_prob=0.1, num_hidden_layers=1
        ).items():
            with torch.no_grad():
                expected = model(**batch).last_hidden_state
                torch.manual_seed(0)
                samples = model.train()(**repeated).last_hidden_state.unflatten(0, (200, 2))
            assert (samples[0] - expected).abs().max() > 0.01, path
            errors = (samples.mean(0) - expected)[batch["attention_mask"] == 1]
            assert errors.abs().mean() < 0.05 * num_attentions, path


class TestLearning:
    """A few dozen steps on a task with a known best loss of predictions that ignore the input."""

    @pytest.mark.fast_families("bert", "gpt2", "t5", "ulmfit")
    @parametrize_forwards
    def test_training_beats_baseline(self, head_case: Case) -> None:
        model = head_case.model(initializer_range=0.05, num_hidden_layers=2).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        validation_batch, baseline = make_training_batch(head_case, rows=64, seed=10_000)
        losses: list[float] = []
        for step in range(200 if head_case.is_recurrent else 90):
            batch, _ = make_training_batch(head_case, rows=16, seed=step)
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 9:
                with torch.no_grad():
                    losses.append(float(model.eval()(**validation_batch).loss))
                model.train()
                if losses[-1] < 0.5 * baseline:
                    return
        pytest.fail(f"the baseline is {baseline:.3f}, the losses are {losses}")
