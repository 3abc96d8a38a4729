"""Cross-view training: losses and gradients for labels and views; views compared with loops."""

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, kl_divergence
from zoo import CASES, make_batch, make_targets

from hf_ctxmodels import CtxCvtConfig, CtxCvtForTokenClassification, CtxCvtTokenizer, CtxError
from hf_ctxmodels.architectures.character_models import second_text_mask
from hf_ctxmodels.models.cvt.configuration_cvt import TEXT_VIEWS, WORD_VIEWS
from hf_ctxmodels.models.cvt.modeling_cvt import CrossViewPredictors, summed_consistency_loss

TAGGER, CLASSIFIER = (
    next(case for case in CASES if case.family.name == "cvt" and case.auto_name == name)
    for name in ("AutoModelForTokenClassification", "AutoModelForSequenceClassification")
)
WIDTH = 3
# left padding, right padding, two sequences, a single word, no padding
SEQUENCES = torch.tensor(
    [[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 2, 2, 2, 0], [0, 0, 0, 1, 0, 0], [1, 1, 1, 1, 1, 1]]
)


@pytest.fixture(params=[TAGGER, CLASSIFIER], ids=str)
def case(request):
    return request.param


def modules_with_gradient(model) -> set[str]:
    names = {
        name for name, parameter in model.named_parameters() if parameter.grad is not None and parameter.grad.any()
    }
    modules = ("primary", "auxiliary", "layers.0", "layers.1")
    return {module for module in modules if any(module in name for name in names)}


def test_modules_trained_by_labels_and_by_views(case) -> None:
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


def test_dropout_applies_only_to_students(case) -> None:
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


def test_view_dropout_overrides_other_rates(case) -> None:
    batch = make_batch(case)
    targets = make_targets(case, batch)
    no_labels = torch.full_like(targets["labels"], -100)
    model = case.model(hidden_dropout_prob=0.5, word_dropout=0.5, view_dropout=0.0).train()
    unlabeled = [float(model(**batch, labels=no_labels, views=targets["views"]).loss) for _ in range(3)]
    assert len(set(unlabeled)) == 1, "dropout with view_dropout=0"
    labeled = {float(model(**batch, labels=targets["labels"]).loss) for _ in range(3)}
    assert len(labeled) == 3, "no dropout with labels"


def test_view_weight_and_selected_views() -> None:
    batch = make_batch(TAGGER)
    targets = make_targets(TAGGER, batch)
    full_weight = TAGGER.model()(**batch, **targets)
    half_weight = TAGGER.model(view_weight=0.5)(**batch, **targets)
    torch.testing.assert_close(half_weight.cross_view_loss, 0.5 * full_weight.cross_view_loss)
    torch.testing.assert_close(half_weight.loss, half_weight.supervised_loss + half_weight.cross_view_loss)
    single_view = TAGGER.model(views=["future"])(**batch, **targets)
    assert 0 < single_view.cross_view_loss < full_weight.cross_view_loss


def test_tasks_have_separate_predictors(tmp_path) -> None:
    tasks = {"chunk": ["O", "B", "I"], "pos": ["a", "b", "c", "d", "e"]}
    model, batch = TAGGER.model(tasks=tasks), make_batch(TAGGER)
    targets = make_targets(TAGGER, batch)
    logits = {task: model(**batch, task=task).logits for task in tasks}
    assert [value.shape[-1] for value in logits.values()] == [3, 5]
    assert torch.equal(model(**batch).logits, logits["chunk"])
    model.save_pretrained(tmp_path)
    loaded = CtxCvtForTokenClassification.from_pretrained(tmp_path).eval()
    torch.testing.assert_close({task: loaded(**batch, task=task).logits for task in tasks}, logits)
    model(**batch, labels=targets["labels"], task="pos").loss.backward()
    for name, parameter in model.predictors.named_parameters():
        assert (parameter.grad is None) == ("chunk" in name or "auxiliary" in name)
    model.zero_grad(set_to_none=True)
    model(**batch, views=targets["views"]).loss.backward()
    auxiliary = [(name, value) for name, value in model.predictors.named_parameters() if "auxiliary" in name]
    assert {name.split(".")[0] for name, parameter in auxiliary if parameter.grad is not None} == {"chunk", "pos"}
    with pytest.raises(CtxError, match="no task 'ner'"):
        model(**batch, task="ner")


def test_default_task_is_saved(tmp_path) -> None:
    """The keys of a saved configuration are sorted."""
    model, batch = TAGGER.model(tasks={"pos": ["a", "b", "c"], "chunk": ["O", "B", "I"]}), make_batch(TAGGER)
    model.save_pretrained(tmp_path)
    loaded = CtxCvtForTokenClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    assert loaded.resolve_task(None) == model.resolve_task(None) == "chunk"


def test_views_at_padding_raise() -> None:
    model, batch = TAGGER.model(), make_batch(TAGGER)
    views = torch.ones_like(batch["attention_mask"])
    with pytest.raises(CtxError, match="padding"):
        model(**batch, views=views)


def random_states(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*SEQUENCES.shape, 2 * WIDTH, generator=generator) * (SEQUENCES != 0)[..., None]


def make_predictors(views: list[str] | None = None, pooling: str | None = None) -> CrossViewPredictors:
    """Predictors of five labels from views of width 3."""
    config = CtxCvtConfig(hidden_size=2 * WIDTH, prediction_size=8, num_hidden_layers=2, views=views)
    return CrossViewPredictors(config, 5, pooling)


@pytest.mark.parametrize(("name", "direction", "step"), [("future", 0, -1), ("past", 1, 1)])
def test_neighbor_views_stay_within_sequence(name: str, direction: int, step: int) -> None:
    predictors, states = make_predictors([name]), random_states()
    logits = predictors.get_views(states, SEQUENCES)[name]
    rows, length = SEQUENCES.shape
    for row in range(rows):
        for column in range(length):
            neighbor, number = column + step, SEQUENCES[row, column]
            has_neighbor = 0 <= neighbor < length and number != 0 and SEQUENCES[row, neighbor] == number
            state = states[row, neighbor] if has_neighbor else torch.zeros(2 * WIDTH)
            expected = predictors.auxiliary[f"{name}_view"](state.split(WIDTH)[direction])
            torch.testing.assert_close(logits[row, column], expected)


@pytest.mark.parametrize("pooling", [None, "mean+max"], ids=["words", "texts"])
def test_views_depend_on_single_direction(pooling: str | None) -> None:
    predictors, first, second = make_predictors(pooling=pooling), random_states(0), random_states(1)
    expected, changed = (predictors.get_views(states, SEQUENCES) for states in (first, second))
    assert list(expected) == list(WORD_VIEWS if pooling is None else TEXT_VIEWS)
    for name in expected:
        half = slice(0, WIDTH) if name in ("forward", "future", "beginning") else slice(WIDTH, None)
        mixed = second.clone()
        mixed[..., half] = first[..., half]
        assert predictors.get_views(mixed, SEQUENCES)[name].equal(expected[name])
        assert not changed[name].equal(expected[name])


def test_beginning_and_end_views_use_half_of_text() -> None:
    """Both include the middle word if the number of words is odd."""
    predictors, sequences = make_predictors(pooling="mean+max"), torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    states = torch.randn(2, 6, 2 * WIDTH, generator=torch.Generator().manual_seed(0))
    expected = predictors.get_views(states, sequences)
    end_changed, beginning_changed = states.clone(), states.clone()
    end_changed[0, 4:], end_changed[1, 2:] = 9.0, 9.0
    beginning_changed[0, :3], beginning_changed[1, :2] = 9.0, 9.0
    for changed, unchanged_view, changed_views in (
        (end_changed, "beginning", ("end", "forward")),
        (beginning_changed, "end", ("beginning", "backward")),
    ):
        views = predictors.get_views(changed, sequences)
        assert views[unchanged_view].equal(expected[unchanged_view])
        assert all((views[name] != expected[name]).any(1).all() for name in changed_views)


@pytest.mark.parametrize("problem_type", ["single_label_classification", "multi_label_classification", "regression"])
def test_consistency_loss(problem_type: str) -> None:
    """Divergence of the students from the teacher; the teacher has no gradient."""
    generator = torch.Generator().manual_seed(0)
    teacher, *students = (torch.randn(6, 4, generator=generator).requires_grad_() for _ in range(3))
    loss = summed_consistency_loss(teacher, dict(zip(("forward", "past"), students)), problem_type)
    if problem_type != "regression":
        distribution = Categorical if problem_type.startswith("single") else Bernoulli
        divergences = [kl_divergence(distribution(logits=teacher), distribution(logits=x)).sum() for x in students]
        torch.testing.assert_close(loss, sum(divergences))
    loss.backward()
    assert loss > 0
    assert teacher.grad is None
    assert all(student.grad.any() for student in students)
    equal_student = summed_consistency_loss(teacher, {"forward": teacher.detach().clone()}, problem_type)
    assert float(equal_student) == pytest.approx(0, abs=1e-5)


@torch.no_grad()
def test_text_pair_features() -> None:
    """Predictions with `text_pairs` combine two separately encoded texts; a single text is paired with itself."""
    tokenizer = CtxCvtTokenizer.from_words([])
    model = CLASSIFIER.model(text_pairs=True, num_hidden_layers=2)
    predictors = model.predictors["task"]

    def vectors(text: str) -> dict[str, Tensor]:
        """The input of each prediction for one text."""
        states = model.cvt(**tokenizer(text, return_tensors="pt"), output_hidden_states=True).hidden_states
        (forward, backward), length = states[1][0].chunk(2, -1), states[1].shape[1]
        half = (length + 1) // 2
        views = {"forward": forward, "backward": backward, "beginning": forward[:half], "end": backward[length // 2 :]}
        views["primary"] = torch.cat(states[1:], -1)[0]
        return {name: torch.cat([view.mean(0), view.amax(0)]) for name, view in views.items()}

    pairs = [("the cat", "a cat sat down on it"), ("so", "it"), ("a cat sat down and slept", "no")]
    batch = tokenizer(*map(list, zip(*pairs, strict=True)), padding=True, return_tensors="pt")
    for inputs, texts in ((batch, pairs), (tokenizer(["the cat"], return_tensors="pt"), [("the cat", "the cat")])):
        sequences: list[Tensor] = []
        handle = predictors.register_forward_hook(
            lambda module, args, output, sequences=sequences: sequences.append(args[1])
        )
        states = model.cvt(
            **inputs, sequence_ids=1 + second_text_mask(inputs["input_ids"]).long(), output_hidden_states=True
        ).hidden_states
        logits = {"primary": model(**inputs).logits}
        logits |= predictors.get_views(states[1], sequences[0])
        handle.remove()
        for name, prediction in logits.items():
            layer = predictors.primary if name == "primary" else predictors.auxiliary[f"{name}_view"]
            u, v = (torch.stack([vectors(text)[name] for text in column]) for column in zip(*texts, strict=True))
            expected = layer(torch.cat([u, v, (u - v).abs(), u * v], -1))
            torch.testing.assert_close(
                prediction, expected, atol=1e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
            )
