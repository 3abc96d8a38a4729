"""Heads: pretraining with several tasks, choices, next-sentence targets, problem types."""

import pickle
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from zoo import (
    CASES,
    FIRST_WORD,
    HEADS,
    Case,
    as_subtests,
    assert_close,
    assert_same_outputs,
    labeled_batch,
    make_batch,
    make_targets,
    tiny_config,
)

from hf_ctxmodels import CtxError, CtxXLMForBeamSearchQuestionAnswering, CtxXLNetForQuestionAnswering
from hf_ctxmodels.heads import next_token_targets
from hf_ctxmodels.registry import FAMILIES

PRETRAINING_CASES = [case for case in CASES if "mlm_loss" in getattr(case.model_class, "loss_terms", ())]
BERT = next(case for case in PRETRAINING_CASES if case.family.name == "bert")


@pytest.mark.parametrize("case", PRETRAINING_CASES, ids=str)
def test_pretraining_head_outputs(case: Case) -> None:
    """The loss is the sum of one term per target; outputs can be pickled."""
    model_class, batch = case.model_class, make_batch(case)
    assert len(model_class.loss_terms) == len(model_class.loss_targets)
    outputs = pickle.loads(pickle.dumps(case.model()(**batch, **make_targets(case, batch))))
    assert set(model_class.loss_terms) <= set(type(outputs).__dataclass_fields__)
    assert_close(outputs.loss, sum(outputs[name] for name in model_class.loss_terms if name in outputs))
    names = {name.removesuffix("_loss") for name in model_class.loss_terms}
    assert set(outputs.metrics) <= {f"{name}_accuracy" for name in names} | {"sbo_share"}


@as_subtests([case for case in HEADS if case.has_choices])
def test_padding_choices_are_excluded(case: Case) -> None:
    """The loss is computed over the real choices; padding choices have no gradient."""
    model, batch = case.model(), make_batch(case)
    mask = torch.ones(batch["input_ids"].shape[:2], dtype=torch.long)
    mask[1:, -1] = 0
    labels = torch.arange(len(mask)) % (mask.shape[1] - 1)
    logits = model(**batch).logits
    outputs = model(**batch, choice_mask=mask, labels=labels)
    assert_close(outputs.logits[mask == 1], logits[mask == 1])
    assert_close(outputs.loss, F.cross_entropy(logits.masked_fill(mask == 0, float("-inf")), labels))
    (gradient,) = torch.autograd.grad(outputs.loss, outputs.logits)
    assert not gradient[mask == 0].any()
    with pytest.raises(CtxError, match="choice_mask is"):
        model(**batch, choice_mask=mask[:, :1])
    labels[1] = mask.shape[1] - 1
    with pytest.raises(CtxError, match=rf"labels\[1\] is {labels[1]}, which is excluded: choice_mask is 0"):
        model(**batch, choice_mask=mask, labels=labels)
    with pytest.raises(CtxError, match=r"attention_mask is .*expected \(batch, choices, ...\)"):
        model(**batch | {"attention_mask": mask})
    input_ids = batch.pop("input_ids")
    assert_close(model(**batch, inputs_embeds=model.get_input_embeddings()(input_ids)).logits, logits)


@pytest.mark.parametrize("side", ["left", "right"])
@as_subtests([case for case in HEADS if not (case.has_choices or case.is_seq2seq)])
def test_padding_of_sequence_ids(case: Case, side: str) -> None:
    """`sequence_ids` of 0 are padding, like an `attention_mask` of 0: in pooling, in the softmax over positions and in
    losses."""
    batch = labeled_batch(case, side=side)
    for name in batch.keys() - {"input_ids", "attention_mask", "position_ids", *case.targets}:
        del batch[name]
    model = case.model()
    with torch.no_grad():
        torch.manual_seed(0)
        expected = model(**batch)
        mask = batch.pop("attention_mask")
        torch.manual_seed(0)
        if case.family.name == "word2vec" and case.trains_static_embeddings:
            with pytest.raises(CtxError, match="window"):
                model(**batch, sequence_ids=mask)
            return
        assert_same_outputs(model(**batch, sequence_ids=mask), expected, mask)
        if case.accepts_inputs_embeds and not (case.has_generator or case.trains_static_embeddings):
            embeddings = case.embed_ids(model, batch.pop("input_ids"))
            expected = model(**batch, inputs_embeds=embeddings, attention_mask=mask)
            assert_same_outputs(model(**batch, inputs_embeds=embeddings, sequence_ids=mask), expected, mask)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "model_class"),
    [("xlm", CtxXLMForBeamSearchQuestionAnswering), ("xlnet", CtxXLNetForQuestionAnswering)],
)
def test_padding_of_sequence_ids_in_beam_search(family: str, model_class: Any) -> None:
    model = model_class(tiny_config(FAMILIES[family], start_n_top=2, end_n_top=2)).eval()
    ids = torch.arange(FIRST_WORD, FIRST_WORD + 16).view(2, 8)
    mask = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
    expected, actual = model(ids, attention_mask=mask), model(ids, sequence_ids=mask)
    assert torch.equal(actual.start_top_index, expected.start_top_index)
    assert_same_outputs(actual, expected)


@torch.no_grad()
def test_beam_search_loss_includes_regularization() -> None:
    model = CtxXLNetForQuestionAnswering(tiny_config(FAMILIES["xlnet"])).train()
    ids, columns = torch.arange(FIRST_WORD, FIRST_WORD + 8)[None], torch.tensor([2])
    expected = model(ids, start_positions=columns, end_positions=columns).loss + 3.0
    model.base_model.regularizers = [lambda: torch.tensor(3.0)]
    assert_close(model(ids, start_positions=columns, end_positions=columns).loss, expected)


@as_subtests([case for case in HEADS if case.auto_name.endswith(("Classification", "QuestionAnswering"))])
def test_number_of_labels(case: Case) -> None:
    """Classifiers have the attribute `num_labels`, as in transformers; PEFT reads it."""
    assert case.model().num_labels == case.config().num_labels == case.num_labels


def test_task_type_ids_without_embeddings_raise() -> None:
    batch = make_batch(BERT)
    with pytest.raises(CtxError, match="CtxBertModel has no embeddings of task_type_ids"):
        BERT.model()(**batch, task_type_ids=torch.zeros_like(batch["input_ids"]))


def test_next_tokens_of_packed_sequences() -> None:
    """The last token of a sequence, in reading order, and padding have no target."""
    labels, sequences = torch.tensor([[5, 6, 7, 8, 9, 0]]), torch.tensor([[1, 1, 2, 2, 2, 0]])
    assert next_token_targets(labels, 6, None, sequences).tolist() == [[6, -100, 8, 9, -100, -100]]
    assert next_token_targets(labels, 6, sequences != 0, None).tolist() == [[6, 7, 8, 9, 0, -100]]
    left_mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    assert next_token_targets(labels, 6, left_mask, None).tolist() == [[-100, -100, 8, 9, 0, -100]]
    assert next_token_targets(labels, 6, None, sequences, backward=True).tolist() == [[-100, 5, -100, 7, 8, -100]]
    assert next_token_targets(labels, 5, None, None).tolist() == [[6, 7, 8, 9, 0]]


def test_next_sentence_targets() -> None:
    """Targets of -100 are ignored; positional arguments work."""
    model = BERT.model()
    batch = make_batch(BERT)
    classes = torch.arange(len(batch["input_ids"])) % 2
    outputs = model(**batch, next_sentence_label=classes)
    assert_close(outputs.loss, F.cross_entropy(outputs.seq_relationship_logits, classes))
    partly_ignored = classes.index_fill(0, torch.tensor([0]), -100)
    correct = (outputs.seq_relationship_logits.argmax(-1) == classes)[1:].sum()
    metrics = model(**batch, next_sentence_label=partly_ignored).metrics
    assert metrics["next_sentence_accuracy"].tolist() == [correct, len(classes) - 1]
    positional = model(batch["input_ids"], batch["attention_mask"], None, None, None, None, classes)
    by_name = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], next_sentence_label=classes)
    assert torch.equal(positional.loss, by_name.loss)


def test_problem_type_is_inferred_per_batch() -> None:
    """The inferred type is not stored in the configuration."""
    case = Case(BERT.family, "AutoModelForSequenceClassification")
    model, batch = case.model(), make_batch(case)
    classes = torch.arange(len(batch["input_ids"])) % model.config.num_labels
    multi_labels = F.one_hot(classes, model.config.num_labels).float()
    for labels, loss in ((classes, F.cross_entropy), (multi_labels, F.binary_cross_entropy_with_logits)) * 2:
        outputs = model(**batch, labels=labels)
        assert_close(outputs.loss, loss(outputs.logits, labels))
        assert model.config.problem_type is None
    regressor = case.model(num_labels=1)
    outputs = regressor(**batch, labels=classes.float())
    assert_close(outputs.loss, F.mse_loss(outputs.logits[:, 0], classes.float()))
    assert regressor.config.problem_type is None
    with pytest.raises(CtxError, match=r"one class for each text(?s:.*)problem_type='multi_label_classification'"):
        model(**batch, labels=multi_labels.long())
    model.config.problem_type = "multilabel"
    with pytest.raises(CtxError, match="problem_type is 'multilabel', expected regression, single_label_"):
        model(**batch, labels=multi_labels)


def test_cross_view_training_requires_problem_type() -> None:
    """The type cannot be inferred from unlabeled texts."""
    case = Case(FAMILIES["cvt"], "AutoModelForSequenceClassification")
    batch = make_batch(case)
    labels = torch.ones(len(batch["input_ids"]), case.num_labels)
    with pytest.raises(CtxError, match="multi_label_classification"):
        case.model()(**batch, labels=labels)
    outputs = case.model(problem_type="multi_label_classification")(**batch, labels=labels)
    assert_close(outputs.loss, F.binary_cross_entropy_with_logits(outputs.logits, labels))


@pytest.mark.parametrize("family", ["bert", "ulmfit", "glove", "cove"])
def test_layer_number_selects_hidden_states(family: str) -> None:
    """Also 0, the embeddings."""
    model_class = FAMILIES[family].models["AutoModel"]
    model = model_class(model_class.config_class(**FAMILIES[family].sizes["tiny"], vocab_size=9))
    ids = torch.ones(1, 3, dtype=torch.long)
    assert model(ids, output_hidden_states=0).hidden_states is not None
    assert model(ids, output_hidden_states=False).hidden_states is None
