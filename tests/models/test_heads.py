"""Properties of heads: pretraining heads with several tasks, choices, problem types."""

import inspect
import pickle

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from zoo import CASES, HEADS, Case, assert_close, make_batch, make_targets

from hf_ctxmodels import CtxBertForSequenceClassification, CtxError

WITH_TASKS = [case for case in CASES if "mlm_loss" in getattr(case.model_class, "loss_terms", ())]
BERT = next(case for case in WITH_TASKS if case.family.name == "bert")


def batch_of(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    batch = make_batch(case)
    return batch, make_targets(case, batch)


@pytest.mark.parametrize("case", WITH_TASKS, ids=str)
def test_output_of_pretraining_heads(case: Case) -> None:
    """The loss is the sum of the terms, of which every target has one; outputs can be pickled."""
    model_class = case.model_class
    parameters = list(inspect.signature(model_class.forward).parameters)
    assert set(model_class.loss_targets) <= set(parameters)
    assert len(model_class.loss_terms) == len(model_class.loss_targets)
    batch, targets = batch_of(case)
    outputs = case.model()(**batch, **targets)
    loaded = pickle.loads(pickle.dumps(outputs))
    assert type(loaded) is type(outputs)
    assert set(model_class.loss_terms) <= set(type(loaded).__dataclass_fields__)
    assert_close(loaded.loss, sum(loaded[name] for name in model_class.loss_terms if name in loaded))
    names = {name.removesuffix("_loss") for name in model_class.loss_terms}
    assert set(loaded.metrics) <= {f"{name}_accuracy" for name in names} | {"sbo_share"}


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


def test_next_sentence_targets() -> None:
    """Targets of -100 are ignored, others are checked; positional arguments work."""
    model = BERT.model()
    batch, targets = batch_of(BERT)
    classes = torch.arange(len(batch["input_ids"])) % 2
    outputs = model(**batch, next_sentence_label=classes)
    assert_close(outputs.loss, F.cross_entropy(outputs.seq_relationship_logits, classes))
    assert outputs.prediction_logits.shape[:2] == batch["input_ids"].shape
    assert model(**batch, labels=targets["labels"], next_sentence_label=classes).prediction_logits is None
    partly_ignored = classes.index_fill(0, torch.tensor([0]), -100)
    correct = (outputs.seq_relationship_logits.argmax(-1) == classes)[1:].sum()
    metrics = model(**batch, next_sentence_label=partly_ignored).metrics
    assert metrics["next_sentence_accuracy"].tolist() == [correct, len(classes) - 1]
    with pytest.raises(CtxError, match="next_sentence_label contains 2"):
        model(**batch, next_sentence_label=classes + 1)
    positional = model(batch["input_ids"], batch["attention_mask"], None, None, None, None, classes)
    by_name = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], next_sentence_label=classes)
    assert torch.equal(positional.loss, by_name.loss)


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
