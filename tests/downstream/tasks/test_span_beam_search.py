"""The question answering heads of XLNet and XLM with beam search, compared with transformers, and the commands."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands import command_output, run_command
from labeled_texts import save_tiny, squad_files
from task_files import make_task
from zoo import assert_close, tiny_config, with_random_parameters

from hf_ctxmodels import CtxError, CtxXLMForBeamSearchQuestionAnswering, CtxXLNetForQuestionAnswering
from hf_ctxmodels.downstream.finetuning.task_evaluation import feature_outputs
from hf_ctxmodels.downstream.tasks.question_answering import Question
from hf_ctxmodels.hub import model_card
from hf_ctxmodels.inference import answer_questions
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.model_loading import new_model

CLASSES = {
    "xlnet": (transformers.XLNetForQuestionAnswering, CtxXLNetForQuestionAnswering),
    "xlm": (transformers.XLMForQuestionAnswering, CtxXLMForBeamSearchQuestionAnswering),
}
FAMILY = FAMILIES["xlnet"]
CONTEXT = " ".join(f"The old sailor painted the red bridge {number} times." for number in range(9))
QUESTIONS = [
    Question("1", "How often?", CONTEXT, ((CONTEXT.index("5 times"), "5 times"),), ""),
    Question("2", "Who?", "Nobody saw the garden.", (), ""),
    Question("3", "What did my neighbor paint?", "My neighbor painted a story.", ((21, "a story"),), ""),
]
TARGETS = ("start_positions", "end_positions", "is_impossible")


@torch.no_grad()
def expected_answer(reference: Any, features: list[Any], windows: list[Any], context: str) -> tuple[str, float]:
    """The best span over the windows of a question, each without padding, and the lowest no-answer logit."""
    spans, null = {}, math.inf
    for feature, window in zip(features, windows, strict=True):
        inputs = {name: torch.tensor(feature[name])[None] for name in feature if name not in TARGETS}
        output = reference(**inputs | {"p_mask": inputs["p_mask"].float()})
        starts = list(zip(output.start_top_index[0].tolist(), output.start_top_log_probs[0].tolist(), strict=True))
        ends = list(zip(output.end_top_index[0].tolist(), output.end_top_log_probs[0].tolist(), strict=True))
        for number, (end, end_probability) in enumerate(ends):
            start, start_probability = starts[number % len(starts)]
            if min(window.spans[start, 0], window.spans[end, 0]) >= 0 and 0 <= end - start < 6:
                text = context[window.spans[start, 0] : window.spans[end, 1]]
                spans[text] = max(spans.get(text, 0.0), start_probability * end_probability)
        null = min(null, float(output.cls_logits))
    return max(spans, key=spans.__getitem__, default=""), null


@pytest.mark.parametrize("family_name", CLASSES)
@torch.no_grad()
def test_loss_and_answers_match_transformers(family_name: str, tmp_path: Path) -> None:
    """The loss of a batch with windows and padding, and the decoded answers."""
    torch.manual_seed(0)
    family, (reference_class, model_class) = FAMILIES[family_name], CLASSES[family_name]
    tokenizer = family.tokenizer.train([question.context for question in QUESTIONS] * 3, vocab_size=90)
    config = tiny_config(family, vocab_size=len(tokenizer), start_n_top=4, end_n_top=3)
    task = make_task("question-answering", max_length=40, doc_stride=9, max_answer_length=6, span_beam_search=True)
    task.configure(config, QUESTIONS, [])
    model = with_random_parameters(new_model("AutoModelForQuestionAnswering", config), 0).eval()
    assert type(model) is model_class
    model.export_reference(tmp_path)
    reference = reference_class.from_pretrained(tmp_path).eval()
    encoded = task.encode(QUESTIONS, tokenizer)
    assert len(encoded.features) > len(QUESTIONS)
    batch = task.collator(tokenizer)(encoded.features)
    is_answerable = [window.target(QUESTIONS[window.example])[0] != window.null_position for window in encoded.origins]
    assert batch["is_impossible"].tolist() == [int(not answerable) for answerable in is_answerable]
    assert 1 < sum(is_answerable) + 1 < len(is_answerable)

    output = model(**batch, return_spans=True)
    expected = reference(**batch | {"p_mask": batch["p_mask"].float(), "is_impossible": batch["is_impossible"].float()})
    assert_close(output.loss, expected.loss)
    inputs = {name: tensor for name, tensor in batch.items() if name not in TARGETS}
    output_without_targets = model(**inputs)
    for name in ("start_top_log_probs", "end_top_log_probs", "cls_logits", "start_top_index", "end_top_index"):
        assert torch.equal(output[name], output_without_targets[name]), name

    answers, texts = task.decode(QUESTIONS, encoded, feature_outputs(task, output, batch)), []
    for number, (question, answer) in enumerate(zip(QUESTIONS, answers, strict=True)):
        rows = [row for row, window in enumerate(encoded.origins) if window.example == number]
        features, windows = ([values[row] for row in rows] for values in (encoded.features, encoded.origins))
        text, null = expected_answer(reference, features, windows, question.context)
        assert answer.text == ("" if null > 0 else text)
        texts.append(text)
        assert answer.no_answer_probability == pytest.approx(1 / (1 + math.exp(-null)), abs=1e-4)
    pairs = [(question.question, question.context) for question in QUESTIONS]
    options = {"max_length": 40, "doc_stride": 9, "max_answer_length": 6, "may_be_unanswerable": True}
    assert [answer.text for answer in answer_questions(model, tokenizer, pairs, **options)] == [
        answer.text for answer in answers
    ]
    for threshold, expected_texts in ((1e6, texts), (-1e6, [""] * len(QUESTIONS))):
        other_task = make_task("question-answering", max_answer_length=6, null_threshold=threshold)
        other_task.has_unanswerable = True
        other_task.use_beam_search()
        decoded = other_task.decode(QUESTIONS, encoded, feature_outputs(task, output, batch))
        assert [answer.text for answer in decoded] == expected_texts


def test_finetune_and_predict_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`predict`, `finetune` and the model card load the saved head; other families raise."""
    files, run = squad_files(tmp_path), tmp_path / "out"
    flags = {"max_steps": 2, "max_length": 24, "per_device_batch_size": 8, "span_beam_search": True, **files}
    assert (
        run_command(
            "finetune",
            "question-answering",
            model=save_tiny(tmp_path / "a", FAMILY, from_transformers=False),
            output_dir=run,
            **flags,
        )
        == 0
    )
    assert json.loads((run / "config.json").read_text())["architectures"] == ["CtxXLNetForQuestionAnswering"]
    assert "CtxXLNetForQuestionAnswering.from_pretrained" in str(model_card(run, "zoo/answers"))
    predictions = tmp_path / "predictions.jsonl"
    command_output("predict", model=run, input=files["validation_file"], output=predictions)
    assert len(predictions.read_text().splitlines()) == 32
    del flags["span_beam_search"]
    second_run = tmp_path / "again"
    assert run_command("finetune", "question-answering", model=run, output_dir=second_run, **flags) == 0
    assert json.loads((second_run / "config.json").read_text())["architectures"] == ["CtxXLNetForQuestionAnswering"]
    capsys.readouterr()
    with pytest.raises(CtxError, match="has no head that searches spans"):
        make_task("question-answering", span_beam_search=True).configure(tiny_config(FAMILIES["bert"]), [], [])
