"""Cross-view training: what labels teach and what their absence does, in one model."""

import pytest
import torch
from zoo import CASES, make_batch, make_targets, randomised

from hf_ctxmodels import CtxCvtConfig, CtxCvtForTokenClassification, CtxError

TAGGER, CLASSIFIER = (
    next(case for case in CASES if case.family.name == "cvt" and case.auto_name == name)
    for name in ("AutoModelForTokenClassification", "AutoModelForSequenceClassification")
)


@pytest.fixture(params=[TAGGER, CLASSIFIER], ids=str)
def case(request):
    return request.param


def parts_with_gradient(model) -> set[str]:
    names = {name for name, each in model.named_parameters() if each.grad is not None and each.grad.abs().sum() > 0}
    kinds = {"primary": "primary", "auxiliary": "auxiliary", "layers.0": "first", "layers.1": "second"}
    return {kind for part, kind in kinds.items() if any(part in name for name in names)}


def test_labels_teach_the_primary_prediction_and_views_the_others(case) -> None:
    model, batch = case.model(num_hidden_layers=2), make_batch(case)
    targets = make_targets(case, batch)
    model(**batch, labels=targets["labels"]).loss.backward()
    assert parts_with_gradient(model) == {"primary", "first", "second"}
    model.zero_grad(set_to_none=True)
    nothing = torch.full_like(targets["labels"], -100)
    output = model(**batch, labels=nothing, views=targets["views"])
    output.loss.backward()
    assert parts_with_gradient(model) == {"auxiliary", "first"}
    assert output.logits is None, "the second layer was computed for nothing"


def test_the_teacher_has_no_dropout_and_students_have(case) -> None:
    """With dropout everywhere, the teacher's part of the loss is that of the model at rest."""
    dropped = {"hidden_dropout_prob": 0.5, "word_dropout": 0.5}
    model, batch = case.model(**dropped), make_batch(case)
    views = make_targets(case, batch)["views"]
    seen = []
    for each in model.predictors.values():
        each.register_forward_hook(lambda module, given, out: seen.append(out.detach()))
    model.train()
    losses = {float(model(**batch, views=views).loss) for _ in range(3)}
    assert len(losses) == 3, "students without dropout"
    assert all(out.equal(seen[0]) for out in seen), "a teacher with dropout"
    assert model.training
    assert all(module.training for module in model.modules())
    torch.testing.assert_close(seen[0], model.eval()(**batch).logits)


def test_views_have_a_dropout_of_their_own(case) -> None:
    batch = make_batch(case)
    targets = make_targets(case, batch)
    nothing = torch.full_like(targets["labels"], -100)
    model = case.model(hidden_dropout_prob=0.5, word_dropout=0.5, view_dropout=0.0).train()
    alone = [float(model(**batch, labels=nothing, views=targets["views"]).loss) for _ in range(3)]
    assert len(set(alone)) == 1, "dropout where view_dropout is 0"
    with_labels = {float(model(**batch, labels=targets["labels"]).loss) for _ in range(3)}
    assert len(with_labels) == 3, "no dropout with labels"


def test_learning_from_views_makes_students_agree(case) -> None:
    dropped = {"hidden_dropout_prob": 0.0, "word_dropout": 0.0, "view_dropout": 0.0}
    model, batch = case.model(**dropped).train(), make_batch(case)
    views = make_targets(case, batch)["views"]
    for parameter in (each for name, each in model.named_parameters() if "auxiliary" not in name):
        parameter.requires_grad_(False)
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=0.02)
    losses = []
    for _ in range(60):
        losses.append(float(model(**batch, views=views).loss.detach()))
        optimizer.zero_grad()
        model(**batch, views=views).loss.backward()
        optimizer.step()
    assert losses[-1] < 0.2 * losses[0]


def test_weight_and_choice_of_views() -> None:
    batch = make_batch(TAGGER)
    targets = make_targets(TAGGER, batch)
    whole = TAGGER.model()(**batch, **targets)
    half = TAGGER.model(view_weight=0.5)(**batch, **targets)
    torch.testing.assert_close(half.cross_view_loss, 0.5 * whole.cross_view_loss)
    torch.testing.assert_close(half.loss, half.supervised_loss + half.cross_view_loss)
    one = TAGGER.model(views=["future"])(**batch, **targets)
    assert 0 < one.cross_view_loss < whole.cross_view_loss


def test_several_tasks_share_all_but_their_predictions() -> None:
    changes = {"tasks": {"chunk": ["O", "B", "I"], "pos": ["a", "b", "c", "d", "e"]}}
    model, batch = TAGGER.model(**changes), make_batch(TAGGER)
    targets = make_targets(TAGGER, batch)
    assert model(**batch).logits.shape[-1] == 3
    assert model(**batch, task="pos").logits.shape[-1] == 5
    model(**batch, labels=targets["labels"], task="pos").loss.backward()
    assert all((each.grad is None) == ("chunk" in name or "auxiliary" in name)
               for name, each in model.named_parameters() if "predictors" in name)  # fmt: skip
    model.zero_grad(set_to_none=True)
    model(**batch, views=targets["views"]).loss.backward()
    taught = {name.split(".")[1] for name, each in model.named_parameters() if each.grad is not None and "auxi" in name}
    assert taught == {"chunk", "pos"}
    with pytest.raises(CtxError, match="no task 'ner'"):
        model(**batch, task="ner")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"views": ["sideways"]}, "sideways"),
        ({"view_weight": -1.0}, "view_weight"),
        ({"tasks": {"pos": ["a"]}}, "two or more labels"),
        ({"pretrained_embeddings": "x", "pretrained_embedding_size": 64, "hidden_size": 64}, "must be below"),
    ],
)
def test_configurations_that_cannot_be(changes: dict, message: str) -> None:
    with pytest.raises(Exception, match=message):
        CtxCvtConfig(**changes)


def test_views_that_do_not_fit() -> None:
    model, batch = TAGGER.model(), make_batch(TAGGER)
    views = torch.ones_like(batch["attention_mask"])
    with pytest.raises(CtxError, match="padding"):
        model(**batch, views=views)


def test_saved_tasks_open_again(tmp_path) -> None:
    config = TAGGER.config(tasks={"chunk": ["O", "B"], "pos": ["a", "b", "c"]})
    model = randomised(CtxCvtForTokenClassification(config), 0).eval()
    model.save_pretrained(tmp_path)
    again = CtxCvtForTokenClassification.from_pretrained(tmp_path).eval()
    batch = make_batch(TAGGER)
    with torch.no_grad():
        torch.testing.assert_close(again(**batch, task="pos").logits, model(**batch, task="pos").logits)
