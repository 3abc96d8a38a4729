"""Cross-view training: losses and gradients with labels and with views."""

import pytest
import torch
from zoo import CASES, make_batch, make_targets, with_random_parameters

from hf_ctxmodels import CtxCvtForTokenClassification, CtxError

TAGGER, CLASSIFIER = (
    next(case for case in CASES if case.family.name == "cvt" and case.auto_name == name)
    for name in ("AutoModelForTokenClassification", "AutoModelForSequenceClassification")
)


@pytest.fixture(params=[TAGGER, CLASSIFIER], ids=str)
def case(request):
    return request.param


def modules_with_gradient(model) -> set[str]:
    names = [
        name for name, parameter in model.named_parameters() if parameter.grad is not None and parameter.grad.any()
    ]
    modules = ("primary", "auxiliary", "layers.0", "layers.1")
    return {module for module in modules if any(module in name for name in names)}


def test_labels_train_the_primary_prediction_and_views_the_auxiliary_predictions(case) -> None:
    model, batch = case.model(num_hidden_layers=2), make_batch(case)
    targets = make_targets(case, batch)
    model(**batch, labels=targets["labels"]).loss.backward()
    assert modules_with_gradient(model) == {"primary", "layers.0", "layers.1"}
    model.zero_grad(set_to_none=True)
    no_labels = torch.full_like(targets["labels"], -100)
    output = model(**batch, labels=no_labels, views=targets["views"])
    output.loss.backward()
    assert modules_with_gradient(model) == {"auxiliary", "layers.0"}
    assert output.logits is None, "the primary prediction is not needed"


def test_only_students_have_dropout(case) -> None:
    rates = {"hidden_dropout_prob": 0.5, "word_dropout": 0.5}
    model, batch = case.model(**rates), make_batch(case)
    views = make_targets(case, batch)["views"]
    teacher_logits = []
    for predictor in model.predictors.values():
        predictor.register_forward_hook(lambda module, inputs, output: teacher_logits.append(output.detach()))
    model.train()
    losses = {float(model(**batch, views=views).loss) for _ in range(3)}
    assert len(losses) == 3, "students without dropout"
    assert all(logits.equal(teacher_logits[0]) for logits in teacher_logits), "a teacher with dropout"
    assert model.training
    assert all(module.training for module in model.modules())
    torch.testing.assert_close(teacher_logits[0], model.eval()(**batch).logits)


def test_view_dropout_replaces_other_rates(case) -> None:
    batch = make_batch(case)
    targets = make_targets(case, batch)
    no_labels = torch.full_like(targets["labels"], -100)
    model = case.model(hidden_dropout_prob=0.5, word_dropout=0.5, view_dropout=0.0).train()
    unlabelled = [float(model(**batch, labels=no_labels, views=targets["views"]).loss) for _ in range(3)]
    assert len(set(unlabelled)) == 1, "dropout with view_dropout=0"
    labelled = {float(model(**batch, labels=targets["labels"]).loss) for _ in range(3)}
    assert len(labelled) == 3, "no dropout with labels"


def test_view_weight_and_selected_views() -> None:
    batch = make_batch(TAGGER)
    targets = make_targets(TAGGER, batch)
    full = TAGGER.model()(**batch, **targets)
    half = TAGGER.model(view_weight=0.5)(**batch, **targets)
    torch.testing.assert_close(half.cross_view_loss, 0.5 * full.cross_view_loss)
    torch.testing.assert_close(half.loss, half.supervised_loss + half.cross_view_loss)
    single_view = TAGGER.model(views=["future"])(**batch, **targets)
    assert 0 < single_view.cross_view_loss < full.cross_view_loss


def test_tasks_have_separate_predictors() -> None:
    changes = {"tasks": {"chunk": ["O", "B", "I"], "pos": ["a", "b", "c", "d", "e"]}}
    model, batch = TAGGER.model(**changes), make_batch(TAGGER)
    targets = make_targets(TAGGER, batch)
    assert model(**batch).logits.shape[-1] == 3
    assert model(**batch, task="pos").logits.shape[-1] == 5
    model(**batch, labels=targets["labels"], task="pos").loss.backward()
    for name, parameter in model.predictors.named_parameters():
        assert (parameter.grad is None) == ("chunk" in name or "auxiliary" in name)
    model.zero_grad(set_to_none=True)
    model(**batch, views=targets["views"]).loss.backward()
    trained_tasks = {
        name.split(".")[0]
        for name, parameter in model.predictors.named_parameters()
        if parameter.grad is not None and "auxiliary" in name
    }
    assert trained_tasks == {"chunk", "pos"}
    with pytest.raises(CtxError, match="no task 'ner'"):
        model(**batch, task="ner")


def test_views_at_padding_are_an_error() -> None:
    model, batch = TAGGER.model(), make_batch(TAGGER)
    views = torch.ones_like(batch["attention_mask"])
    with pytest.raises(CtxError, match="padding"):
        model(**batch, views=views)


def test_save_and_load_several_tasks(tmp_path) -> None:
    config = TAGGER.config(tasks={"chunk": ["O", "B"], "pos": ["a", "b", "c"]})
    model = with_random_parameters(CtxCvtForTokenClassification(config), 0).eval()
    model.save_pretrained(tmp_path)
    loaded = CtxCvtForTokenClassification.from_pretrained(tmp_path).eval()
    batch = make_batch(TAGGER)
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch, task="pos").logits, model(**batch, task="pos").logits)
