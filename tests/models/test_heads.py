"""What heads derive from a family's names and configuration: pair heads, kinds of problems, output layers."""

import inspect
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import CASES, HEADS, Case, assert_close, make_batch, make_targets

from hf_ctxmodels import CtxBertForPreTraining, CtxBertForSequenceClassification, CtxError
from hf_ctxmodels.heads import ForMaskedLMWithTasks, PretrainingTask

WITH_TASKS = [case for case in CASES if issubclass(case.model_class, ForMaskedLMWithTasks)]
BERT = next(case for case in WITH_TASKS if case.family.name == "bert")


class StructuralPretraining(CtxBertForPreTraining):
    """Three classes of pairs under names of its own, as StructBERT has them."""

    tasks = (PretrainingTask("structure", "structure_label", "nsp_head", "structure_logits"),)

    def build_head(self, config) -> None:
        super().build_head(config)
        self.nsp_head = nn.Linear(config.hidden_size, 3)


def batch_of(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    batch = make_batch(case)
    return batch, make_targets(case, batch)


@pytest.mark.parametrize("case", WITH_TASKS, ids=str)
def test_a_head_of_several_tasks_has_their_names(case: Case) -> None:
    kind = case.model_class
    names = [task.name for task in kind.tasks]
    assert kind.loss_targets == ("labels", *(task.target for task in kind.tasks))
    shown = list(inspect.signature(kind.forward).parameters)[6:]
    assert tuple(shown[: len(kind.loss_targets)]) == kind.loss_targets
    assert shown[len(kind.loss_targets)] == "num_items_in_batch"
    own = [task.logits for task in kind.tasks if task.logits is not None]
    fields = ["loss", "prediction_logits", *own, "mlm_loss", *(f"{name}_loss" for name in names)]
    assert list(kind.output_class.__dataclass_fields__) == [*fields, "metrics", "hidden_states", "attentions"]
    batch, targets = batch_of(case)
    found = case.model()(**batch, **targets)
    again = pickle.loads(pickle.dumps(found))
    assert type(again) is kind.output_class
    terms = [again[f"{name}_loss"] for name in ("mlm", *names) if f"{name}_loss" in again]
    assert_close(again.loss, sum(terms))
    assert set(again.metrics) <= {f"{name}_accuracy" for name in names} | {"sbo_share"}


def test_choices_that_fill_a_row_up_are_in_no_softmax(subtests: pytest.Subtests) -> None:
    """Of every family: the loss is that of the shorter rows by themselves, and gives what fills up no gradient."""
    for case in (case for case in HEADS if case.has_choices):
        with subtests.test(str(case)):
            model, batch = case.model().eval(), make_batch(case)
            mask = torch.ones(batch["input_ids"].shape[:2], dtype=torch.long)
            mask[1:, -1] = 0
            labels = torch.arange(len(mask)) % (mask.shape[1] - 1)
            plain = model(**batch).logits
            found = model(**batch, choice_mask=mask, labels=labels)
            assert_close(found.logits[mask == 1], plain[mask == 1])
            lengths = mask.sum(1).tolist()
            terms = [row[label] - row[:length].logsumexp(0) for row, label, length in zip(plain, labels, lengths)]
            assert_close(found.loss, -torch.stack(terms).mean())
            (gradient,) = torch.autograd.grad(found.loss, found.logits, retain_graph=True)
            assert not gradient[mask == 0].any()
            with pytest.raises(CtxError, match="choice_mask is"):
                model(**batch, choice_mask=mask[:, :1])


def test_a_pair_head_of_three_classes() -> None:
    torch.manual_seed(0)
    model = StructuralPretraining(BERT.config()).eval()
    batch, targets = batch_of(BERT)
    classes = torch.arange(len(batch["input_ids"])) % 3
    found = model(**batch, structure_label=classes)
    assert type(found).__name__ == "StructuralPretrainingOutput"
    assert_close(found.loss, F.cross_entropy(found.structure_logits, classes))
    assert found.prediction_logits.shape[:2] == batch["input_ids"].shape
    assert model(**batch, labels=targets["labels"], structure_label=classes).prediction_logits is None
    some = classes.index_fill(0, torch.tensor([0]), -100)
    right = (found.structure_logits.argmax(-1) == classes)[1:].sum()
    assert model(**batch, structure_label=some).metrics["structure_accuracy"].tolist() == [right, len(classes) - 1]
    with pytest.raises(CtxError, match="structure_label holds 3"):
        model(**batch, structure_label=classes + 1)
    by_place = model(batch["input_ids"], batch["attention_mask"], None, None, None, None, classes)
    by_name = model(**{name: batch[name] for name in ("input_ids", "attention_mask")}, structure_label=classes)
    assert torch.equal(by_place.loss, by_name.loss)


def test_the_kind_of_problem_follows_each_batch_and_is_not_kept() -> None:
    case = next(each for each in CASES if each.model_class is CtxBertForSequenceClassification)
    model, batch = case.model(), make_batch(case)
    classes = torch.arange(len(batch["input_ids"])) % model.config.num_labels
    several = F.one_hot(classes, model.config.num_labels).float()
    for labels, loss in ((classes, F.cross_entropy), (several, F.binary_cross_entropy_with_logits)) * 2:
        found = model(**batch, labels=labels)
        assert_close(found.loss, loss(found.logits, labels))
        assert model.config.problem_type is None
    one = case.model(num_labels=1)
    found = one(**batch, labels=classes.float())
    assert_close(found.loss, F.mse_loss(found.logits[:, 0], classes.float()))
    assert one.config.problem_type is None


def test_cross_view_training_asks_for_the_kind_of_problem() -> None:
    """Texts without labels have no type of labels to follow."""
    name = "AutoModelForSequenceClassification"
    case = next(each for each in CASES if each.family.name == "cvt" and each.auto_name == name)
    batch = make_batch(case)
    labels = torch.ones(len(batch["input_ids"]), case.num_labels)
    with pytest.raises(CtxError, match="multi_label_classification"):
        case.model()(**batch, labels=labels)
    model = case.model(problem_type="multi_label_classification")
    found = model(**batch, labels=labels)
    assert_close(found.loss, F.binary_cross_entropy_with_logits(found.logits, labels))
