"""Each term of a distillation loss against plain loops over rows without padding, and what cannot be learned."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from distillation_models import LENGTHS, VOCABULARY, batch_of, classifier, features, gradients, new_model, tagger, tags
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import assert_close

from hf_ctxmodels import CtxAlbertConfig, CtxAlbertForMaskedLM, CtxBertModel
from hf_ctxmodels.compression.distillation import (
    AttentionScoreLoss,
    CosineLoss,
    CtxDistillationModel,
    EmbeddingLoss,
    HardTargetLoss,
    HiddenStateLoss,
    LogitLoss,
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

TOKENS, LABELED = sum(LENGTHS), 1 + 2 + 3 + 1


MASKED: list[int] = []
"""How many scores were masks, for each call of `scores`."""


def each_row(model: Any, row: dict[str, Any]) -> Any:
    """The output of a row by itself, without padding."""
    return model(input_ids=row["input_ids"][None], output_hidden_states=True)


def scores(model: Any, states: Tensor, layer: int, head: int) -> Tensor:
    """Scaled products of queries and keys, one pair at a time."""
    attention = model.base_model.layers[layer - 1].attention
    width, size = attention.inner_size, attention.head_dim
    weight, bias = attention.qkv_proj.weight, attention.qkv_proj.bias
    part = slice(head * size, (head + 1) * size)
    queries = states @ weight[:width][part].T + bias[:width][part]
    keys = states @ weight[width : 2 * width][part].T + bias[width : 2 * width][part]
    products = torch.stack([torch.stack([(query * key).sum() / size**0.5 for key in keys]) for query in queries])
    MASKED.append(int((products <= -100).sum()))
    return torch.where(products <= -100, 0.0, products)


def kl_divergence(own: Tensor, other: Tensor, temperature: float) -> Tensor:
    own, other = own.double() / temperature, other.double() / temperature
    return (other.softmax(-1) * (other.log_softmax(-1) - own.log_softmax(-1))).sum() * temperature**2


def mapped(model: CtxDistillationModel, name: str, states: Tensor) -> Tensor:
    return model.projections[name](states) if name in model.projections else states


PAIRS = {"uniform": [(0, 0), (1, 2), (2, 4)], "0:0": [(0, 0)], "skip": [(1, 2)], "1:3,2:1": [(1, 3), (2, 1)]}
"""Of a student of 2 layers and a teacher of 4."""


@dataclass(frozen=True)
class Loops:
    """A term by loops: what a row adds to the sum. `own` and `other` are the outputs of both models for the row."""

    model: CtxDistillationModel
    term: Any

    def hidden(self, own: Any, other: Any, row: Any) -> Any:
        return sum(
            (mapped(self.model, self.term.name, own.hidden_states[a]) - other.hidden_states[b]).square().mean(-1).sum()
            for a, b in PAIRS[self.term.layers]
        )

    embeddings = hidden

    def patient(self, own: Any, other: Any, row: Any) -> Any:
        units = [
            (F.normalize(own.hidden_states[a][0, 0], dim=0), F.normalize(other.hidden_states[b][0, 0], dim=0))
            for a, b in PAIRS[self.term.layers]
        ]
        return torch.stack([a - b for a, b in units]).square().mean()

    def attention(self, own: Any, other: Any, row: Any) -> Any:
        total: Any = 0.0
        for a, b in [(1, 2), (2, 4)]:
            for head in range(2):
                student_scores = scores(self.model.student, own.hidden_states[a - 1][0], a, head)
                teacher_scores = scores(self.model.teacher, other.hidden_states[b - 1][0], b, head)
                total = total + (student_scores - teacher_scores).square().mean(1).sum() / 2
        return total

    def predicted(self, output: Any, row: Any) -> Any:
        """The row's logits: (1, classes), or for a tagger (labeled tokens, classes)."""
        logits = output.logits
        if logits.dim() == 2:
            return logits
        return logits[0] if logits.shape[-1] == VOCABULARY else logits[0][row["labels"] != IGNORE_INDEX]

    def soft_targets(self, own: Any, other: Any, row: Any) -> Any:
        where = row["labels"] != IGNORE_INDEX if self.term.masked_only else slice(None)  # of text alone
        return kl_divergence(self.predicted(own, row)[where], self.predicted(other, row)[where], self.term.temperature)

    def hard_targets(self, own: Any, other: Any, row: Any) -> Any:
        if own.logits.dim() == 2:
            return F.cross_entropy(own.logits, torch.tensor([row["class"]]))
        labels = row["labels"] if own.logits.shape[-1] == VOCABULARY else tags(row)
        return F.cross_entropy(own.logits[0], labels, reduction="sum")

    def logits(self, own: Any, other: Any, row: Any) -> Any:
        return (self.predicted(own, row) - self.predicted(other, row)).square().mean(-1).sum()

    def soft_classes(self, own: Any, other: Any, row: Any) -> Any:
        own, other = self.predicted(own, row), self.predicted(other, row)
        return -(other.softmax(-1) * own.log_softmax(-1)).mean(-1).sum()

    def sentences(self, own: Any, other: Any, row: Any) -> Any:
        vector = mapped(self.model, self.term.name, own.hidden_states[-1][0].mean(0))
        target = other.hidden_states[-1][0].mean(0)
        if self.term.distance == "mse":
            return (vector - target).square().mean()
        return 1 - F.cosine_similarity(vector, target, dim=0)

    def cosine(self, own: Any, other: Any, row: Any) -> Any:
        return (1 - F.cosine_similarity(own.hidden_states[-1][0], other.hidden_states[-1][0], dim=-1)).sum()


def oracle(model: CtxDistillationModel, term: DistillationLoss, rows: list[dict[str, Any]], kind: str) -> Any:
    """The sum over rows divided by the number of targets."""
    of_predictions = term.inputs == "predictions"
    labeled = isinstance(term, HardTargetLoss) or getattr(term, "masked_only", False)
    labeled = labeled or (kind == "tags" and of_predictions)
    once_a_row = isinstance(term, (PatientLoss, SentenceVectorLoss)) or (kind == "rows" and of_predictions)
    total: Any = 0.0
    for row in rows:
        with torch.no_grad():
            other = each_row(model.teacher, row)
        loop = getattr(Loops(model, term), term.name.replace("-", "_"))
        total = total + loop(each_row(model.student, row), other, row)
    return total / (len(rows) if once_a_row else LABELED if labeled else TOKENS)


MASKED_LM_LOSSES = [
    *(SoftTargetLoss(), SoftTargetLoss(temperature=1.0, masked_only=True), HardTargetLoss(), CosineLoss()),
    *(PatientLoss(), PatientLoss(layers="1:3,2:1"), AttentionScoreLoss(), EmbeddingLoss()),
    *(HiddenStateLoss(), HiddenStateLoss(projection=False), HiddenStateLoss(layers="1:3,2:1")),
    *(SentenceVectorLoss(), SentenceVectorLoss(distance="mse")),
]
TASK_LOSSES = [SoftTargetLoss(temperature=5.0), HardTargetLoss(), LogitLoss(), SoftClassLoss()]
CLASSIFIER_LOSSES = [*TASK_LOSSES, PatientLoss(), CosineLoss(), SentenceVectorLoss()]
TAGGER_LOSSES = [*TASK_LOSSES, HiddenStateLoss()]
KINDS = [
    (new_model, "text", MASKED_LM_LOSSES),
    (classifier, "rows", CLASSIFIER_LOSSES),
    (tagger, "tags", TAGGER_LOSSES),
]


def test_each_term_and_its_gradients_are_those_of_plain_loops(subtests):
    rows = features()
    rows[0]["labels"][:] = IGNORE_INDEX
    rows[0]["labels"][2] = rows[0]["input_ids"][2]
    for make, kind, terms in KINDS:
        for term in terms:
            for narrow in (False, True):
                if narrow and not (isinstance(term, (HiddenStateLoss, SentenceVectorLoss)) and term.projection):
                    continue
                with subtests.test(term=str(term), kind=kind, narrow=narrow):
                    width = {"hidden_size": 4} if narrow else {}
                    student, teacher = make(2, **width), make(4, seed=1)
                    for block in teacher.base_model.layers[:2]:  # scores below -100, which count as 0
                        block.attention.qkv_proj.weight.data *= 12
                    model = CtxDistillationModel(student, teacher, [term])
                    output = model(**batch_of(rows, kind))
                    output.loss.backward()
                    got = gradients(model)
                    expected = oracle(model, term, rows, kind)
                    expected.backward()
                    assert_close(output.loss.double(), expected.double(), str(term))
                    assert_close(getattr(output, term.output_name), output.loss, "the term for the log")
                    references = gradients(model)
                    assert got.keys() >= {name for name, gradient in references.items() if gradient.abs().max() > 0}
                    for name, gradient in references.items():
                        assert_close(got.get(name, torch.zeros_like(gradient)), gradient, f"{term} {name}", 2e-5)
                    assert max(float(gradient.abs().max()) for gradient in got.values()) > 1e-6
    assert sum(MASKED) > 0, "no score shows the rule for masks"


def test_the_divergence_in_chunks_is_that_of_whole_logits(monkeypatch, subtests):
    generator = torch.Generator().manual_seed(0)
    rows, others = (torch.randn(9, width, generator=generator) for width in (4, 6))
    student, teacher = nn.Linear(4, VOCABULARY), nn.Linear(6, VOCABULARY, bias=False)

    def chunked_gradients(own: nn.Module, temperature: float) -> list[Tensor]:
        leaf = rows.clone().requires_grad_()
        total = chunked_kl_divergence(DeferredLogits(leaf, own), DeferredLogits(others, teacher), temperature)
        parameters = [leaf, *own.parameters()]
        return [total.detach(), *torch.autograd.grad(total * 3, parameters)]

    for temperature in (1.0, 2.0):
        leaf = rows.clone().requires_grad_()
        expected = F.kl_div(
            (student(leaf) / temperature).log_softmax(-1), (teacher(others) / temperature).softmax(-1), reduction="sum"
        )
        expected = expected * temperature**2
        references = [expected.detach(), *torch.autograd.grad(expected * 3, [leaf, *student.parameters()])]
        for rows_at_once in (1, 4, 9):
            with subtests.test(temperature=temperature, rows=rows_at_once):
                monkeypatch.setattr(chunked, "CHUNK_ELEMENTS", rows_at_once * VOCABULARY)
                for got, right in zip(chunked_gradients(student, temperature), references, strict=True):
                    assert_close(got, right)
        with subtests.test(temperature=temperature, rows="a map that is called"):
            hooked = nn.Linear(4, VOCABULARY)
            hooked.load_state_dict(student.state_dict())
            hooked.register_forward_hook(lambda *_: None)
            for got, right in zip(chunked_gradients(hooked, temperature), references, strict=True):
                assert_close(got, right)
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_one_batch_of_four_is_two_of_two(subtests):
    rows = features()
    for make, kind, terms in KINDS:
        for term in terms:
            with subtests.test(term=str(term), kind=kind):
                model = CtxDistillationModel(
                    make(2), make(4, seed=1), [HardTargetLoss(), term][isinstance(term, HardTargetLoss) :]
                )
                model(**batch_of(rows, kind)).loss.backward()
                whole = gradients(model)
                parts = [batch_of(rows[:1], kind), batch_of(rows[1:], kind)]
                counted = dict(zip(model.loss_targets, count_targets(parts, model.loss_targets).tolist(), strict=True))
                for part in parts:
                    model(**part, num_items_in_batch=counted).loss.backward()
                for name, gradient in gradients(model).items():
                    assert_close(gradient, whole[name], name)


def test_layer_maps(subtests):
    for first in (0, 1):
        expected = {
            ("uniform", 3, 6): ((0, 0), (1, 2), (2, 4), (3, 6))[first:],
            ("skip", 6, 12): ((1, 2), (2, 4), (3, 6), (4, 8), (5, 10)),
            ("last", 6, 12): ((1, 7), (2, 8), (3, 9), (4, 10), (5, 11)),
            ("2:1,1:5", 2, 5): ((2, 1), (1, 5)),
        }
        for (text, student, teacher), pairs in expected.items():
            with subtests.test(text, first_layer=first):
                assert parse_layer_map(text, student, teacher, first_layer=first) == pairs
    wrong = {"uniform": "multiple", "1:6": "layer 6 of the teacher", "3:1": "layer 3 of the student", "0:1": "layer 0"}
    wrong |= dict.fromkeys(("", "1", "1:2;2:3", "-1:2", "first"), "not a layer map")
    for text, message in wrong.items():
        with subtests.test(text), pytest.raises(CtxError, match=message):
            parse_layer_map(text, 2, 5, first_layer=1)


def test_what_cannot_be_learned_is_explained(subtests):
    teacher, student = new_model(4, seed=1), new_model(2)
    narrow, wide_vocabulary = new_model(2, hidden_size=4), new_model(2, vocab_size=24)
    untrained = classifier(4, seed=1)
    untrained.newly_initialized_modules = ("classifier",)
    four_heads = new_model(2, num_attention_heads=4)
    albert = CtxAlbertForMaskedLM(
        CtxAlbertConfig(vocab_size=24, embedding_size=4, hidden_size=8, num_attention_heads=2, intermediate_size=8)
    )
    cases: dict[str, tuple[Any, Any, list[DistillationLoss], str]] = {
        "no term": (student, teacher, [], "no loss"),
        "twice": (student, teacher, [CosineLoss(), CosineLoss(weight=2.0)], "occurs twice"),
        "itself": (teacher, teacher, [CosineLoss()], "same model"),
        "width": (narrow, teacher, [CosineLoss()], "width 4.*width 8"),
        "width of patience": (narrow, teacher, [PatientLoss()], "width 4"),
        "no projection": (narrow, teacher, [HiddenStateLoss(projection=False)], "width 4.*width 8"),
        "no projection of sentences": (narrow, teacher, [SentenceVectorLoss(projection=False)], "width 4.*width 8"),
        "vocabulary": (wide_vocabulary, teacher, [SoftTargetLoss()], "24 classes, the teacher 23 .vocab_size"),
        "another family's vocabulary": (albert, teacher, [SoftTargetLoss()], "vocab_size"),
        "heads": (four_heads, teacher, [AttentionScoreLoss()], "4 attention heads, the teacher 2"),
        "labels": (classifier(2, labels=2), classifier(4), [SoftClassLoss()], "2 classes, the teacher 3"),
        "no classes": (classifier(2, labels=1), classifier(4, labels=1), [SoftClassLoss()], "regression"),
        "no head": (classifier(2), untrained, [LogitLoss()], "no trained head.*classifier"),
        "another head": (classifier(2), teacher, [LogitLoss()], "no trained head"),
        "a tagger's teacher": (tagger(2), classifier(4), [SoftClassLoss()], "no trained head"),
        "no head of the student": (CtxBertModel(student.config), teacher, [HardTargetLoss()], "has no loss"),
        "masked LM without classes": (student, teacher, [SoftClassLoss()], "no predictions"),
        "beyond": (student, teacher, [HiddenStateLoss(layers="1:5")], "layer 5 of the teacher"),
        "one layer": (new_model(1), teacher, [PatientLoss()], "empty"),
    }
    for name, (own, other, terms, message) in cases.items():
        with subtests.test(name), pytest.raises(CtxError, match=message):
            CtxDistillationModel(own, other, terms)
    batch = batch_of(features())
    other_ids = {"teacher_input_ids": batch["input_ids"], "teacher_attention_mask": batch["attention_mask"]}
    with subtests.test("tokens of two tokenizers"), pytest.raises(CtxError, match="compare tokens"):
        CtxDistillationModel(student, teacher, [CosineLoss()])(**batch, **other_ids)
    with subtests.test("no labels"), pytest.raises(CtxError, match="needs labels"):
        CtxDistillationModel(student, teacher, [HardTargetLoss()])(input_ids=batch["input_ids"])
    for texts, message in (
        ([], "one or more losses"),
        (["soft-target:weight=1"], "soft-target"),
        (["cosine:weight=1", "cosine:weight=2"], "occurs twice"),
        (["cosine:weight=x"], "weight"),
        (["patient:weight=1,layer=skip"], "layer"),
        (["soft-targets:temperature=0"], "temperature"),
    ):
        with subtests.test(f"{texts}"), pytest.raises(CtxError, match=message):
            parse_losses(texts)
    assert parse_losses(["hidden:weight=2,projection=false"]) == [HiddenStateLoss(weight=2.0, projection=False)]
