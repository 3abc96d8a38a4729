"""Distillation losses against loops over unpadded examples, layer maps, and errors."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from distillation_models import (
    LENGTHS,
    VOCABULARY,
    distillation_batch,
    features,
    gradients,
    make_classifier,
    make_tagger,
    new_model,
    token_classes,
)
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import assert_close

from hf_ctxmodels import (
    CtxAlbertConfig,
    CtxAlbertForMaskedLM,
    CtxBertModel,
    CtxGptConfig,
    CtxGptForSequenceClassification,
    CtxUlmfitConfig,
    CtxUlmfitForSequenceClassification,
)
from hf_ctxmodels.compression.distillation import (
    AttentionScoreLoss,
    CosineLoss,
    CtxDistillationModel,
    EmbeddingLoss,
    HardTargetLoss,
    HiddenStateLoss,
    LogitLoss,
    MiniLMLoss,
    MiniLMv2Loss,
    PatientLoss,
    SentenceVectorLoss,
    SoftClassLoss,
    SoftTargetLoss,
    parse_losses,
)
from hf_ctxmodels.compression.distillation.losses import DistillationLoss, parse_layer_map
from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.lm_loss import cross_entropy as chunked
from hf_ctxmodels.layers.lm_loss.cross_entropy import DeferredLogits
from hf_ctxmodels.layers.lm_loss.kl_divergence import chunked_kl_divergence
from hf_ctxmodels.training.training_step import count_targets

NUM_TOKENS, NUM_LABELED = sum(LENGTHS), 1 + 2 + 3 + 1


NUM_MASKED_SCORES: list[int] = []
"""Number of scores treated as masked (at most -100), for each call of `attention_scores`."""


def single_output(model: Any, row: dict[str, Any]) -> Any:
    return model(input_ids=row["input_ids"][None], output_hidden_states=True)


def attention_scores(model: Any, states: Tensor, layer: int, head: int) -> Tensor:
    """Scaled products of queries and keys, one pair at a time."""
    attention = model.base_model.layers[layer - 1].attention
    width, size = attention.inner_size, attention.head_dim
    weight, bias = attention.qkv_proj.weight, attention.qkv_proj.bias
    head_rows = slice(head * size, (head + 1) * size)
    queries = states @ weight[:width][head_rows].T + bias[:width][head_rows]
    keys = states @ weight[width : 2 * width][head_rows].T + bias[width : 2 * width][head_rows]
    products = torch.stack([torch.stack([(query * key).sum() / size**0.5 for key in keys]) for query in queries])
    NUM_MASKED_SCORES.append(int((products <= -100).sum()))
    return torch.where(products <= -100, 0.0, products)


def relations(model: Any, states: Tensor, layer: int, pair: tuple[int, int], head: int, num_heads: int) -> Tensor:
    """Log-softmax of the scaled products of two of queries (0), keys (1) and values (2), one query at a time."""
    projection = model.base_model.layers[layer - 1].attention.qkv_proj
    vectors = (states @ projection.weight.T + projection.bias).chunk(3, dim=1)
    size = vectors[0].shape[1] // num_heads
    a, b = (vectors[number][:, head * size : (head + 1) * size].double() for number in pair)
    return torch.stack([torch.log_softmax(torch.stack([(x * y).sum() / size**0.5 for y in b]), 0) for x in a])


def kl_divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    student, teacher = student.double() / temperature, teacher.double() / temperature
    return (teacher.softmax(-1) * (teacher.log_softmax(-1) - student.log_softmax(-1))).sum() * temperature**2


def project(model: CtxDistillationModel, name: str, states: Tensor) -> Tensor:
    return model.projections[name](states) if name in model.projections else states


LAYER_PAIRS = {"uniform": [(0, 0), (1, 2), (2, 4)], "0:0": [(0, 0)], "skip": [(1, 2)], "1:3,2:1": [(1, 3), (2, 1)]}
"""Layer pairs of each layer map, for a student of 2 layers and a teacher of 4."""


@dataclass(frozen=True)
class LoopTerms:
    """Sum of a loss term over one example, by loops. `student` and `teacher` are the outputs of the models."""

    model: CtxDistillationModel
    term: Any

    def hidden(self, student: Any, teacher: Any, row: Any) -> Any:
        return sum(
            (project(self.model, self.term.name, student.hidden_states[a]) - teacher.hidden_states[b])
            .square()
            .mean(-1)
            .sum()
            for a, b in LAYER_PAIRS[self.term.layers]
        )

    embeddings = hidden

    def patient(self, student: Any, teacher: Any, row: Any) -> Any:
        units = [
            (F.normalize(student.hidden_states[a][0, 0], dim=0), F.normalize(teacher.hidden_states[b][0, 0], dim=0))
            for a, b in LAYER_PAIRS[self.term.layers]
        ]
        return torch.stack([a - b for a, b in units]).square().mean()

    def attention(self, student: Any, teacher: Any, row: Any) -> Any:
        total: Any = 0.0
        for a, b in [(1, 2), (2, 4)]:
            for head in range(2):
                student_scores = attention_scores(self.model.student, student.hidden_states[a - 1][0], a, head)
                teacher_scores = attention_scores(self.model.teacher, teacher.hidden_states[b - 1][0], b, head)
                total = total + (student_scores - teacher_scores).square().mean(1).sum() / 2
        return total

    def minilm(self, student: Any, teacher: Any, row: Any) -> Any:
        return self.relation_loss(student, teacher, [(0, 1), (2, 2)], 2)

    def minilmv2(self, student: Any, teacher: Any, row: Any) -> Any:
        return self.relation_loss(student, teacher, [(0, 0), (1, 1), (2, 2)], self.term.relation_heads)

    def relation_loss(self, student: Any, teacher: Any, pairs: list[tuple[int, int]], num_heads: int) -> Any:
        total, teacher_layer = 0.0, self.term.teacher_layer or 4
        for pair in pairs:
            for head in range(num_heads):
                states, targets = student.hidden_states[1][0], teacher.hidden_states[teacher_layer - 1][0]
                log_relations = relations(self.model.student, states, 2, pair, head, num_heads)
                log_targets = relations(self.model.teacher, targets, teacher_layer, pair, head, num_heads)
                total = total + (log_targets.exp() * (log_targets - log_relations)).sum() / num_heads
        return total

    def predictions(self, output: Any, row: Any) -> Any:
        """The row's logits: (1, classes), or for a tagger (labeled tokens, classes)."""
        logits = output.logits
        if logits.dim() == 2:
            return logits
        return logits[0] if logits.shape[-1] == VOCABULARY else logits[0][row["labels"] != IGNORE_INDEX]

    def soft_targets(self, student: Any, teacher: Any, row: Any) -> Any:
        positions = row["labels"] != IGNORE_INDEX if self.term.masked_only else slice(None)  # text only
        return kl_divergence(
            self.predictions(student, row)[positions], self.predictions(teacher, row)[positions], self.term.temperature
        )

    def hard_targets(self, student: Any, teacher: Any, row: Any) -> Any:
        if student.logits.dim() == 2:
            return F.cross_entropy(student.logits, torch.tensor([row["class"]]))
        labels = row["labels"] if student.logits.shape[-1] == VOCABULARY else token_classes(row)
        return F.cross_entropy(student.logits[0], labels, reduction="sum")

    def logits(self, student: Any, teacher: Any, row: Any) -> Any:
        return (self.predictions(student, row) - self.predictions(teacher, row)).square().mean(-1).sum()

    def soft_classes(self, student: Any, teacher: Any, row: Any) -> Any:
        student, teacher = self.predictions(student, row), self.predictions(teacher, row)
        return -(teacher.softmax(-1) * student.log_softmax(-1)).mean(-1).sum()

    def sentences(self, student: Any, teacher: Any, row: Any) -> Any:
        vector = project(self.model, self.term.name, student.hidden_states[-1][0].mean(0))
        target = teacher.hidden_states[-1][0].mean(0)
        if self.term.distance == "mse":
            return (vector - target).square().mean()
        return 1 - F.cosine_similarity(vector, target, dim=0)

    def cosine(self, student: Any, teacher: Any, row: Any) -> Any:
        return (1 - F.cosine_similarity(student.hidden_states[-1][0], teacher.hidden_states[-1][0], dim=-1)).sum()


def reference_loss(model: CtxDistillationModel, term: DistillationLoss, rows: list[dict[str, Any]], task: str) -> Any:
    """The sum over rows divided by the number of targets."""
    uses_predictions = term.inputs == "predictions"
    counts_labels = isinstance(term, HardTargetLoss) or getattr(term, "masked_only", False)
    counts_labels = counts_labels or (task == "tags" and uses_predictions)
    counts_rows = isinstance(term, (PatientLoss, SentenceVectorLoss)) or (task == "rows" and uses_predictions)
    total: Any = 0.0
    for row in rows:
        with torch.no_grad():
            teacher_output = single_output(model.teacher, row)
        row_loss = getattr(LoopTerms(model, term), term.name.replace("-", "_"))
        total = total + row_loss(single_output(model.student, row), teacher_output, row)
    return total / (len(rows) if counts_rows else NUM_LABELED if counts_labels else NUM_TOKENS)


MASKED_LM_LOSSES = [
    *(SoftTargetLoss(), SoftTargetLoss(temperature=1.0, masked_only=True), HardTargetLoss(), CosineLoss()),
    *(PatientLoss(), PatientLoss(layers="1:3,2:1"), AttentionScoreLoss(), EmbeddingLoss()),
    *(HiddenStateLoss(), HiddenStateLoss(projection=False), HiddenStateLoss(layers="1:3,2:1")),
    *(SentenceVectorLoss(), SentenceVectorLoss(distance="mse")),
    *(MiniLMLoss(), MiniLMLoss(teacher_layer=3), MiniLMv2Loss(relation_heads=4)),
    MiniLMv2Loss(relation_heads=1, teacher_layer=2),
]
TASK_LOSSES = [SoftTargetLoss(temperature=5.0), HardTargetLoss(), LogitLoss(), SoftClassLoss()]
CLASSIFIER_LOSSES = [*TASK_LOSSES, PatientLoss(), CosineLoss(), SentenceVectorLoss(), MiniLMLoss()]
TAGGER_LOSSES = [*TASK_LOSSES, HiddenStateLoss(), MiniLMv2Loss(relation_heads=4)]
TASKS = [
    (new_model, "text", MASKED_LM_LOSSES),
    (make_classifier, "rows", CLASSIFIER_LOSSES),
    (make_tagger, "tags", TAGGER_LOSSES),
]


def test_losses_and_gradients_equal_loops(subtests):
    rows = features()
    rows[0]["labels"][:] = IGNORE_INDEX
    rows[0]["labels"][2] = rows[0]["input_ids"][2]
    for build, task, terms in TASKS:
        for term in terms:
            for narrow in (False, True):
                has_projection = isinstance(term, (HiddenStateLoss, SentenceVectorLoss)) and term.projection
                if narrow and not (has_projection or isinstance(term, (MiniLMLoss, MiniLMv2Loss))):
                    continue
                with subtests.test(term=str(term), task=task, narrow=narrow):
                    sizes = {"hidden_size": 4} if narrow else {}
                    student, teacher = build(2, **sizes), build(4, seed=1)
                    for layer in teacher.base_model.layers[:2]:  # some scores are below -100 and count as 0
                        layer.attention.qkv_proj.weight.data *= 12
                    model = CtxDistillationModel(student, teacher, [term])
                    output = model(**distillation_batch(rows, task))
                    output.loss.backward()
                    actual = gradients(model)
                    expected = reference_loss(model, term, rows, task)
                    expected.backward()
                    assert_close(output.loss.double(), expected.double(), str(term))
                    assert_close(getattr(output, term.output_name), output.loss, "logged loss")
                    references = gradients(model)
                    assert actual.keys() >= {name for name, gradient in references.items() if gradient.abs().max() > 0}
                    for name, gradient in references.items():
                        assert_close(actual.get(name, torch.zeros_like(gradient)), gradient, f"{term} {name}", 2e-5)
                    assert max(float(gradient.abs().max()) for gradient in actual.values()) > 1e-6
    assert sum(NUM_MASKED_SCORES) > 0, "no score was masked"


def test_chunked_kl_divergence_matches_dense(monkeypatch, subtests):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(9, width, generator=generator) for width in (4, 6))
    student, teacher = nn.Linear(4, VOCABULARY), nn.Linear(6, VOCABULARY, bias=False)

    def chunked_gradients(layer: nn.Module, temperature: float) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        total = chunked_kl_divergence(DeferredLogits(leaf, layer), DeferredLogits(y, teacher), temperature)
        parameters = [leaf, *layer.parameters()]
        return [total.detach(), *torch.autograd.grad(total * 3, parameters)]

    for temperature in (1.0, 2.0):
        leaf = x.clone().requires_grad_()
        expected = F.kl_div(
            (student(leaf) / temperature).log_softmax(-1), (teacher(y) / temperature).softmax(-1), reduction="sum"
        )
        expected = expected * temperature**2
        references = [expected.detach(), *torch.autograd.grad(expected * 3, [leaf, *student.parameters()])]
        for chunk_rows in (1, 4, 9):
            with subtests.test(temperature=temperature, rows=chunk_rows):
                monkeypatch.setattr(chunked, "CHUNK_ELEMENTS", chunk_rows * VOCABULARY)
                for actual, reference in zip(chunked_gradients(student, temperature), references, strict=True):
                    assert_close(actual, reference)
        with subtests.test(temperature=temperature, rows="layer with a hook"):
            hooked_layer = nn.Linear(4, VOCABULARY)
            hooked_layer.load_state_dict(student.state_dict())
            hooked_layer.register_forward_hook(lambda *_: None)
            for actual, reference in zip(chunked_gradients(hooked_layer, temperature), references, strict=True):
                assert_close(actual, reference)
    assert all(parameter.grad is None for parameter in teacher.parameters())


@pytest.mark.parametrize(
    ("build", "task", "terms"),
    [pytest.param(*case, id=case[1], marks=() if case[1] == "rows" else pytest.mark.slow) for case in TASKS],
)
def test_micro_batches_equal_one_batch(build, task, terms, subtests):
    rows = features()
    for term in terms:
        with subtests.test(term=str(term), task=task):
            model = CtxDistillationModel(
                build(2), build(4, seed=1), [HardTargetLoss(), term][isinstance(term, HardTargetLoss) :]
            )
            model(**distillation_batch(rows, task)).loss.backward()
            expected = gradients(model)
            batches = [distillation_batch(rows[:1], task), distillation_batch(rows[1:], task)]
            counts = dict(zip(model.loss_targets, count_targets(batches, model.loss_targets).tolist(), strict=True))
            for batch in batches:
                model(**batch, num_items_in_batch=counts).loss.backward()
            for name, gradient in gradients(model).items():
                assert_close(gradient, expected[name], name)


def test_parse_layer_map(subtests):
    for first_layer in (0, 1):
        expected = {
            ("uniform", 3, 6): ((0, 0), (1, 2), (2, 4), (3, 6))[first_layer:],
            ("skip", 6, 12): ((1, 2), (2, 4), (3, 6), (4, 8), (5, 10)),
            ("last", 6, 12): ((1, 7), (2, 8), (3, 9), (4, 10), (5, 11)),
            ("2:1,1:5", 2, 5): ((2, 1), (1, 5)),
        }
        for (text, student, teacher), pairs in expected.items():
            with subtests.test(text, first_layer=first_layer):
                assert parse_layer_map(text, student, teacher, first_layer=first_layer) == pairs
    errors = {"uniform": "multiple", "1:6": "layer 6 of the teacher", "3:1": "layer 3 of the student", "0:1": "layer 0"}
    errors |= dict.fromkeys(("", "1", "1:2;2:3", "-1:2", "first"), "not a layer map")
    for text, message in errors.items():
        with subtests.test(text), pytest.raises(CtxError, match=message):
            parse_layer_map(text, 2, 5, first_layer=1)


def test_invalid_distillation_raises(subtests):
    teacher, student = new_model(4, seed=1), new_model(2)
    narrow, wide_vocabulary = new_model(2, hidden_size=4), new_model(2, vocab_size=24)
    untrained = make_classifier(4, seed=1)
    untrained.newly_initialized_modules = ("classifier",)
    four_heads = new_model(2, num_attention_heads=4)
    albert = CtxAlbertForMaskedLM(
        CtxAlbertConfig(vocab_size=24, embedding_size=4, hidden_size=8, num_attention_heads=2, intermediate_size=8)
    )
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 8}
    causal = CtxGptForSequenceClassification(CtxGptConfig(**sizes, num_attention_heads=2, num_hidden_layers=2))
    recurrent = CtxUlmfitForSequenceClassification(CtxUlmfitConfig(**sizes, num_hidden_layers=2))
    cases: dict[str, tuple[Any, Any, list[DistillationLoss], str]] = {
        "no term": (student, teacher, [], "no loss"),
        "twice": (student, teacher, [CosineLoss(), CosineLoss(weight=2.0)], "occurs twice"),
        "itself": (teacher, teacher, [CosineLoss()], "same model"),
        "width": (narrow, teacher, [CosineLoss()], "width 4.*width 8"),
        "width of patient loss": (narrow, teacher, [PatientLoss()], "width 4"),
        "no projection": (narrow, teacher, [HiddenStateLoss(projection=False)], "width 4.*width 8"),
        "sentences not projected": (narrow, teacher, [SentenceVectorLoss(projection=False)], "width 4.*width 8"),
        "vocabulary": (wide_vocabulary, teacher, [SoftTargetLoss()], "24 classes, the teacher 23 .vocab_size"),
        "another family's vocabulary": (albert, teacher, [SoftTargetLoss()], "vocab_size"),
        "heads": (four_heads, teacher, [AttentionScoreLoss()], "4 attention heads, the teacher 2"),
        "heads of relations": (four_heads, teacher, [MiniLMLoss()], "4 attention heads, the teacher 2"),
        "relation heads": (narrow, teacher, [MiniLMv2Loss(relation_heads=8)], "relation_heads=8.*4 in the stud.*8 in"),
        "teacher's layer": (student, teacher, [MiniLMLoss(teacher_layer=5)], "teacher_layer=5.*layers 1 to 4"),
        "causal teacher": (make_classifier(2), causal, [MiniLMLoss()], "CtxGptForSequenceClassification is causal"),
        "no Transformer": (make_classifier(2), recurrent, [MiniLMv2Loss()], "LSTM has no attention scores"),
        "labels": (make_classifier(2, labels=2), make_classifier(4), [SoftClassLoss()], "2 classes, the teacher 3"),
        "no classes": (make_classifier(2, labels=1), make_classifier(4, labels=1), [SoftClassLoss()], "regression"),
        "several labels": (
            *(make_classifier(layers, problem_type="multi_label_classification") for layers in (2, 4)),
            [SoftTargetLoss()],
            "labels of a text with several labels are not classes",
        ),
        "no head": (make_classifier(2), untrained, [LogitLoss()], "no trained head.*classifier"),
        "another head": (make_classifier(2), teacher, [LogitLoss()], "no trained head"),
        "a tagger's teacher": (make_tagger(2), make_classifier(4), [SoftClassLoss()], "no trained head"),
        "no head of the student": (CtxBertModel(student.config), teacher, [HardTargetLoss()], "has no loss"),
        "masked LM without classes": (student, teacher, [SoftClassLoss()], "no predictions"),
        "layer out of range": (student, teacher, [HiddenStateLoss(layers="1:5")], "layer 5 of the teacher"),
        "one layer": (new_model(1), teacher, [PatientLoss()], "empty"),
    }
    for name, (student_model, teacher_model, terms, message) in cases.items():
        with subtests.test(name), pytest.raises(CtxError, match=message):
            CtxDistillationModel(student_model, teacher_model, terms)
    batch = distillation_batch(features())
    teacher_inputs = {"teacher_input_ids": batch["input_ids"], "teacher_attention_mask": batch["attention_mask"]}
    for loss in (CosineLoss(), MiniLMLoss()):
        with subtests.test("different tokenizers", loss=loss.name), pytest.raises(CtxError, match="compare tokens"):
            CtxDistillationModel(student, teacher, [loss])(**batch, **teacher_inputs)
    with subtests.test("no labels"), pytest.raises(CtxError, match="needs labels"):
        CtxDistillationModel(student, teacher, [HardTargetLoss()])(input_ids=batch["input_ids"])
    for texts, message in (
        ([], "one or more losses"),
        (["soft-target:weight=1"], "soft-target"),
        (["cosine:weight=1", "cosine:weight=2"], "occurs twice"),
        (["cosine:weight=x"], "weight"),
        (["soft-classes:weight=1,temperature=0"], "temperature=0.0 is out of range"),
        (["patient:weight=1,layer=skip"], "layer"),
        (["soft-targets:temperature=0"], "temperature"),
        (["minilm:teacher_layer=0"], "teacher_layer=0 is out of range"),
        (["minilmv2:relation_heads=0"], "relation_heads=0 is out of range"),
    ):
        with subtests.test(f"{texts}"), pytest.raises(CtxError, match=message):
            parse_losses(texts)
    with subtests.test("distance"), pytest.raises(CtxError, match="distance='euclidean'"):
        SentenceVectorLoss(distance="euclidean")
    assert parse_losses(["hidden:weight=2,projection=false"]) == [HiddenStateLoss(weight=2.0, projection=False)]
