"""Prompt tasks: formatting, few-shot contexts, metrics with hand-computed values, the command, packaged tasks."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from commands import command_output
from transformers import PreTrainedModel, PreTrainedTokenizerBase, RobertaConfig, RobertaForMaskedLM, XLNetConfig
from zoo import Case

from hf_ctxmodels import CtxError
from hf_ctxmodels.analysis.results import AnalysisResult
from hf_ctxmodels.architectures.continuations import ContinuationScore, ContinuationScorer, GreedyAnswer
from hf_ctxmodels.cli.evaluate_prompts import PromptArguments, TaskData
from hf_ctxmodels.core.command_line import packaged_folder
from hf_ctxmodels.core.generation import max_input_length
from hf_ctxmodels.evaluation import score_tokens
from hf_ctxmodels.evaluation.prompts.evaluation import (
    MetricValue,
    PromptResult,
    PseudoLikelihoodScorer,
    UnigramScorer,
    evaluate_prompts,
    majority_accuracy,
    mean_value,
)
from hf_ctxmodels.evaluation.prompts.tables import TableRow, format_table
from hf_ctxmodels.evaluation.prompts.tasks import PromptExample, PromptTask, find_tasks, read_tasks
from hf_ctxmodels.registry import FAMILIES

TRAIN = ["the cat saw a small garden", "a dog carried seven letters", "nobody mended the bridge", "the sailor forgot"]
VALIDATION = [("a garden", 1), ("the red boat", 0), ("a garden", 1)]
TASK_YAML = """
tasks:
  mood:
    file: {train: train.tsv, validation: validation.tsv}
    description: "Moods.\\n"
    input: "{sentence} Mood:"
    target: "{label}"
    labels: {0: "bad", 1: "very good"}
    metrics: [accuracy, f1]
  last:
    file: {validation: last.jsonl}
    format: lambada
    input: "{context}"
    target: "{word}"
    scoring: likelihood
  question:
    file: {validation: questions.jsonl}
    input: "{question}"
    target: "{answers}"
    metrics: [squad]
    max_new_tokens: 3
  schema:
    file: {validation: schemas.jsonl}
    format: wsc273
    scoring: partial
    input: "{before}"
    separator: ""
    target: "{label}"
    labels: "{substitutes}"
    suffix: "{after}"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [f"{text}\t{number % 2}" for number, text in enumerate(TRAIN)]
    (tmp_path / "train.tsv").write_text("\n".join(["sentence\tlabel", *rows]))
    rows = [f"{text}\t{label}" for text, label in VALIDATION]
    (tmp_path / "validation.tsv").write_text("\n".join(["sentence\tlabel", *rows]))
    files: dict[str, list[dict[str, Any]]] = {
        "last.jsonl": [{"text": text} for text in TRAIN],
        "questions.jsonl": [
            {"question": "who saw the garden ?", "answers": ["the cat", "a cat"]},
            {"question": "who forgot ?", "answers": ["the sailor"]},
        ],
        "schemas.jsonl": [
            {
                "text": "The cat saw her bridge. They saw it.",
                "pronoun": "her",
                "pronoun_start": 12,
                "candidates": ["The cat", "A dog"],
                "label": 1,
            },
            {"text": "It fell.", "pronoun": "It", "pronoun_start": 0, "candidates": ["The cat", "A dog"], "label": 0},
        ],
    }
    for name, records in files.items():
        (tmp_path / name).write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "tasks.yaml").write_text(TASK_YAML)
    return tmp_path


def read_task(folder: Path, name: str) -> tuple[PromptTask, list[PromptExample]]:
    task = read_tasks(folder / "tasks.yaml", folder)[name]
    return task, task.read("validation")


class TableScorer:
    """Log-probabilities and numbers of tokens by (context, continuation), or by continuation."""

    def __init__(self, scores: dict[Any, tuple[float, int]]) -> None:
        self.scores, self.requests = scores, list[tuple[str, str]]()

    def score(self, requests: Sequence[tuple[str, str]]) -> list[ContinuationScore]:
        self.requests += requests
        results = [self.scores.get(request) or self.scores[request[1]] for request in requests]
        return [ContinuationScore(value, tokens, 0, value > -1) for value, tokens in results]


def test_prompts_match_evaluation_harness(folder: Path) -> None:
    """Description, examples sampled by one generator, input; the continuation starts with the separator."""
    task, examples = read_task(folder, "mood")
    pool = task.read("train")
    contexts = task.contexts(examples, pool, 2, seed=7)
    rng, expected = Random(7), []
    for _ in examples:
        first, second = rng.sample(range(4), 2)
        answers = ["bad", "very good"]
        expected.append(
            f"Moods.\n{TRAIN[first]} Mood: {answers[first % 2]}\n\n{TRAIN[second]} Mood: {answers[second % 2]}\n\n"
        )
    assert contexts == expected
    assert len(set(contexts)) > 1
    assert task.contexts(examples, pool, 0, seed=7) == ["Moods.\n"] * 3
    shared = task.contexts(examples, pool, 2, seed=7, shared=True)
    assert shared == [expected[0]] * 3
    assert task.requests(contexts[0], examples[0]) == [
        (f"{expected[0]}a garden Mood:", " bad"),
        (f"{expected[0]}a garden Mood:", " very good"),
    ]
    with pytest.raises(CtxError, match="4 examples are too few for contexts with 5"):
        task.contexts(examples, pool, 5, seed=0)


def test_contexts_exclude_evaluated_example(folder: Path) -> None:
    """An example is not in its own context, even if the file repeats it; a shared context has no evaluated example."""
    task, examples = read_task(folder, "mood")
    for seed in range(8):
        contexts = task.contexts(examples, examples, 1, seed, is_same_file=True)
        assert [context.count("garden") for context in contexts] == [0, 1, 0]
    with pytest.raises(CtxError, match="1 examples are too few for contexts with 2"):
        task.contexts(examples, examples, 2, 0, is_same_file=True)
    contexts = task.contexts(examples[:1], examples, 1, 0, is_same_file=True, shared=True)
    assert "boat" in contexts[0]
    with pytest.raises(CtxError, match="0 examples are too few"):
        task.contexts(examples, examples, 1, 0, is_same_file=True, shared=True)


def test_contexts_from_the_evaluated_file(folder: Path) -> None:
    """`--evaluated_file` and `--shots_file` may be the same file, and `--evaluated_file` may be file.train."""
    task, _ = read_task(folder, "mood")
    for flags in ({"evaluated_file": str(folder / "train.tsv")}, {"shots_file": str(folder / "." / "validation.tsv")}):
        arguments = PromptArguments(model=["x"], task=["x"], output_dir="x", **flags)
        data = TaskData.read(task, arguments)
        assert data.is_same_file
        assert data.task.contexts(data.examples, data.pool, 1, 0, is_same_file=True)
    assert not TaskData.read(task, PromptArguments(model=["x"], task=["x"], output_dir="x")).is_same_file


def test_train_filter(folder: Path) -> None:
    """The task's filter selects only the examples of contexts; a missing file raises."""
    (folder / "tasks.yaml").write_text(TASK_YAML.replace("metrics: [accuracy, f1]", 'train_filter: {label: "1"}'))
    task, examples = read_task(folder, "mood")
    assert [example.text.label for example in task.read("train", is_pool=True)] == [1, 1]
    assert [example.text.label for example in examples] == [1, 0, 1]
    (folder / "train.tsv").unlink()
    with pytest.raises(CtxError, match="has no such file"):
        task.read("train", is_pool=True)


def test_five_normalizations_of_likelihoods(folder: Path) -> None:
    """Each normalization selects by its own quotient: "bad" has 3 characters and "very good" 9."""
    task, examples = read_task(folder, "mood")
    examples = examples[:1] * 2 + examples[1:2]  # labels 1, 1, 0
    conditional = {" bad": (-3.0, 1), " very good": (-4.0, 4)}
    unconditional = {("Answer:", " bad"): (-1.0, 1), ("Answer:", " very good"): (-4.5, 4)}
    scorer = TableScorer({**conditional, **unconditional})
    result = evaluate_prompts(task, examples, ["", "", ""], scorer)
    values = {name: metric.value for name, metric in result.metrics.items()}
    one_third = pytest.approx(1 / 3)
    assert values == {
        "acc": one_third,  # -3 > -4: bad
        "acc_norm": pytest.approx(2 / 3),  # -3/3 < -4/9
        "acc_bytes": pytest.approx(2 / 3),
        "acc_tokens": pytest.approx(2 / 3),  # -3/1 < -4/4
        "acc_calibrated": pytest.approx(2 / 3),  # -3+1 < -4+4.5
        "f1": 0.0,
    }
    assert result.metrics["acc"].standard_error == pytest.approx(math.sqrt(1 / 3 * 2 / 3 / 2))
    assert result.metrics["f1"].standard_error is None
    assert len(scorer.requests) == len(set(scorer.requests)) == 6  # two prompts and the calibration
    assert result.records[0]["log_probabilities"] == [-3.0, -4.0]
    assert majority_accuracy(examples, examples).value == pytest.approx(2 / 3)


def test_normalizations_by_bytes_and_tokens(folder: Path) -> None:
    """Characters, bytes and tokens of the answers differ: é has two bytes."""
    (folder / "tasks.yaml").write_text(TASK_YAML.replace('"bad"', '"éé"').replace('"very good"', '"abc"'))
    task, examples = read_task(folder, "mood")
    scores: dict[Any, tuple[float, int]] = {" éé": (-2.0, 4), " abc": (-2.1, 1)}
    metrics = evaluate_prompts(task, examples[:1], [""], TableScorer(scores)).metrics  # the label is abc
    assert {name: metric.value for name, metric in metrics.items() if name.startswith("acc")} == {
        "acc": 0.0,
        "acc_norm": 1.0,  # -2/2 < -2.1/3
        "acc_bytes": 0.0,  # -2/4 > -2.1/3
        "acc_tokens": 0.0,  # -2/4 > -2.1/1
        "acc_calibrated": 0.0,  # both 0: the first
    }


def test_lambada_metrics(folder: Path) -> None:
    task, examples = read_task(folder, "last")
    assert task.requests("", examples[0]) == [("the cat saw a small", " garden")]
    values = [-0.5, -2.0, -3.0, -2.5]
    words = [f" {text.split()[-1]}" for text in TRAIN]
    scorer = TableScorer({word: (value, 1) for word, value in zip(words, values, strict=True)})
    metrics = evaluate_prompts(task, examples, [""] * 4, scorer).metrics
    assert metrics["acc"].value == 0.25  # TableScorer's greedy continuations have values above -1
    assert metrics["perplexity"].value == pytest.approx(math.exp(2.0))
    standard_error = mean_value(values).standard_error
    assert standard_error == pytest.approx(math.sqrt((1.5**2 + 0 + 1 + 0.5**2) / 3 / 4))
    assert metrics["perplexity"].standard_error == pytest.approx(math.exp(2.0) * standard_error)


def test_partial_scoring(folder: Path) -> None:
    """Candidates replace the pronoun, with lower-case article and possessive; the rest of the sentence is scored."""
    task, examples = read_task(folder, "schema")
    requests = task.requests("", examples[0])
    assert requests == [
        ("The cat saw the cat's", " bridge. They saw it."),
        ("The cat saw a dog's", " bridge. They saw it."),
    ]
    assert task.requests("", examples[1]) == [("The cat", " fell."), ("A dog", " fell.")]
    scorer = TableScorer({requests[0]: (-2.0, 1), requests[1]: (-1.0, 1)})
    assert evaluate_prompts(task, examples[:1], [""], scorer).metrics == {"acc": MetricValue(1.0)}
    assert task.demonstration(examples[0]) == "The cat saw a dog's bridge. They saw it.\n\n"


def test_generated_answers(folder: Path) -> None:
    """The first line is normalized as in SQuAD, and compared with all accepted answers."""
    task, examples = read_task(folder, "question")
    calls = []

    class Decoder(TableScorer):
        def greedy_answers(self, contexts: Sequence[str], *, until: Sequence[str], max_new_tokens: int):
            calls.append((list(contexts), list(until), max_new_tokens))
            return [GreedyAnswer("The Cat.")]

    result = evaluate_prompts(task, examples[:1], ["x "], Decoder({}))
    assert calls == [(["x who saw the garden ?"], ["\n"], 3)]
    assert {name: metric.value for name, metric in result.metrics.items()} == {"f1": 100.0, "exact_match": 100.0}
    assert result.records[0]["output"] == "The Cat."
    with pytest.raises(CtxError, match="needs a model that generates text"):
        evaluate_prompts(task, examples[:1], [""], TableScorer({}))


def test_corpus_level_metrics(folder: Path) -> None:
    """Entity F1 is computed over all outputs, not averaged over examples."""
    rows = [{"question": "a", "answers": "B-x O"}, {"question": "b", "answers": "O O O"}]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "tasks.yaml").write_text(TASK_YAML.replace("[squad]", "[entities]"))
    task, examples = read_task(folder, "question")

    class Decoder(TableScorer):
        def greedy_answers(self, contexts: Sequence[str], *, until: Sequence[str], max_new_tokens: int):
            return [GreedyAnswer("B-x O"), GreedyAnswer("O O O")]

    metrics = evaluate_prompts(task, examples, ["", ""], Decoder({})).metrics
    assert metrics["f1"] == MetricValue(1.0)


def test_table_format() -> None:
    metrics = {"perplexity": MetricValue(1234.5678, 12.2512), "acc": MetricValue(0.01, 0.02)}
    assert format_table([TableRow("lambada_openai", 1, 0, metrics)]).split("\n") == [
        "|    Tasks     |Version|Filter|n-shot|  Metric  |   |  Value  |   |Stderr |",
        "|--------------|------:|------|-----:|----------|---|--------:|---|------:|",
        "|lambada_openai|      1|none  |     0|acc       |↑  |   0.0100|±  | 0.0200|",
        "|              |       |none  |     0|perplexity|↓  |1234.5678|±  |12.2512|",
    ]


def test_childrens_book_test(tmp_path: Path) -> None:
    """The candidate and the rest of the sentence are scored."""
    lines = [f"{number} Sentence {number} ." for number in range(1, 21)]
    (tmp_path / "cbt.txt").write_text("\n".join([*lines, "21 Then XXXXX ran away .\tcat\t\tdog|cat|owl", ""]))
    (task,) = find_tasks("cbt_cn", tmp_path)
    (example,) = task.read(str(tmp_path / "cbt.txt"))
    (context, first), (_, second), _ = task.requests("", example)
    assert context.startswith("Sentence 1 . Sentence 2 .")
    assert context.endswith("Sentence 20 . Then")
    assert (first, second) == (" dog ran away .", " cat ran away .")
    assert example.text.label == 1
    (tmp_path / "cbt.txt").write_text("\n".join([*lines, "21 XXXXX ran away .\tcat\t\tdog|cat|owl", ""]))
    (example,) = task.read(str(tmp_path / "cbt.txt"))  # a blank at the start: one space before the candidate
    assert task.requests("", example)[0][0].endswith("Sentence 20 .")
    (tmp_path / "cbt.txt").write_text("21 Then it ran away .\tcat\t\tdog|cat")
    with pytest.raises(CtxError, match="Not a question with candidates"):
        task.read(str(tmp_path / "cbt.txt"))


def make_model(family: str, auto_name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = FAMILIES[family].tokenizer.train(TRAIN * 5, vocab_size=300)
    names = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    model = Case(FAMILIES[family], auto_name).model(vocab_size=len(tokenizer), max_position_embeddings=32, **names)
    tokenizer.model_max_length = 32
    return model, tokenizer


@pytest.mark.parametrize(
    ("family", "auto_name"),
    [("bert", "AutoModelForMaskedLM"), ("xlnet", "AutoModelForCausalLM")],
    ids=["bert", "xlnet"],
)
def test_pseudo_likelihoods(family: str, auto_name: str) -> None:
    """The sum over the continuation, each token given all others; long contexts are truncated on the left."""
    tokenizer = FAMILIES[family].tokenizer.train(TRAIN * 5, vocab_size=300)
    model = Case(FAMILIES[family], auto_name).model(vocab_size=len(tokenizer))
    requests = [("the cat saw", " a small garden"), ("nobody", " mended the bridge"), ("", "the sailor forgot")]
    scores = PseudoLikelihoodScorer(model, tokenizer, batch_tokens=30).score(requests)
    for (context, continuation), result in zip(requests, scores, strict=True):
        num_tokens = len(tokenizer.tokenize(context + continuation)) - len(tokenizer.tokenize(context))
        tokens = score_tokens(model, tokenizer, context + continuation)[-num_tokens:]
        assert result.num_tokens == num_tokens
        assert result.log_probability == pytest.approx(sum(token.log_probability for token in tokens), abs=1e-4)
        assert result.is_greedy == all(token.rank == 1 for token in tokens)
    num_special = tokenizer.num_special_tokens_to_add()
    limit = num_special + len(tokenizer.tokenize("the cat saw a small garden"))
    long_request = [("nobody mended the bridge the cat saw", " a small garden")]
    (truncated,) = PseudoLikelihoodScorer(model, tokenizer, max_length=limit).score(long_request)
    assert truncated.log_probability == pytest.approx(scores[0].log_probability, abs=1e-4)
    assert [score.is_truncated for score in (*scores, truncated)] == [False, False, False, True]
    with pytest.raises(CtxError, match="too many tokens"):
        PseudoLikelihoodScorer(model, tokenizer, max_length=num_special + 1).score(long_request)
    for context, continuation in (("the cat saw a garden", ""), ("the cat saw a garde", "n")):  # fewer tokens together
        with pytest.raises(CtxError, match="has no token"):
            PseudoLikelihoodScorer(model, tokenizer).score([(context, continuation)])


def test_pseudo_likelihood_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch has more than `batch_tokens` tokens, unless it is one sequence; a context is tokenized once for all of
    its continuations."""
    model, tokenizer = make_model("bert", "AutoModelForMaskedLM")
    shapes, texts = list[tuple[int, ...]](), list[str]()
    encode, tokenize = model.encode, type(tokenizer).__call__

    def record_shape(**inputs: Any) -> Any:
        shapes.append(tuple(inputs["input_ids"].shape))
        return encode(**inputs)

    def record_text(self: Any, text: str, **options: Any) -> Any:
        texts.append(text)
        return tokenize(self, text, **options)

    monkeypatch.setattr(model, "encode", record_shape)
    monkeypatch.setattr(type(tokenizer), "__call__", record_text)
    context, continuations = "the cat saw", [" a small garden", " a dog", " nobody"]
    requests = [(context, continuation) for continuation in continuations]
    scores = {}
    for batch_tokens in (5, 24, 2048):
        shapes.clear()
        texts.clear()
        result = PseudoLikelihoodScorer(model, tokenizer, batch_tokens=batch_tokens).score(requests)
        scores[batch_tokens] = [score.log_probability for score in result]
        assert all(rows == 1 or rows * length <= batch_tokens for rows, length in shapes)
        assert len(shapes) > 1 or batch_tokens == 2048
        assert texts.count(context) == 1
    assert scores[5] == pytest.approx(scores[2048], abs=1e-4)
    assert scores[24] == pytest.approx(scores[2048], abs=1e-4)


def test_truncated_prompts_are_counted(folder: Path) -> None:
    """The share of examples with truncated contexts, also because of the length of answers."""
    model, tokenizer = make_model("gpt2", "AutoModelForCausalLM")
    for name, limit, expected in (("mood", None, 0.0), ("mood", 8, 1.0), ("question", None, 0.0), ("question", 6, 0.5)):
        task, examples = read_task(folder, name)
        if name == "question":
            examples = [examples[0], replace(examples[0], text=replace(examples[0].text, input="who"))]
        scorer = ContinuationScorer(model, tokenizer, max_length=limit)
        assert evaluate_prompts(task, examples, [""] * len(examples), scorer).truncated == expected


def test_input_limits_of_transformers_models() -> None:
    """RoBERTa's positions start after the id of the padding token, which reduces the limit; XLNet has no limit."""
    tokenizer = FAMILIES["roberta"].tokenizer.train(TRAIN * 5, vocab_size=300)
    config = RobertaConfig(
        vocab_size=len(tokenizer), hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=30, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    assert max_input_length(config) == 29 - config.pad_token_id
    model = RobertaForMaskedLM(config)
    (score,) = PseudoLikelihoodScorer(model, tokenizer).score([(" ".join(TRAIN * 3), " the cat")])
    assert math.isfinite(score.log_probability)
    assert max_input_length(XLNetConfig()) is None


def test_unigram_scorer() -> None:
    tokenizer = FAMILIES["gpt2"].tokenizer.train(TRAIN * 5, vocab_size=300)
    scorer = UnigramScorer(tokenizer, ["the the the cat"])
    first, second, rare = scorer.score([("x", " the"), ("y", " the"), ("x", " garden")])
    assert first == second
    assert first.log_probability > rare.log_probability


INVALID_TASKS = [
    ('labels: {0: "bad", 1: "very good"}', "round: 0.2", "not a number"),
    ("scoring: likelihood", "scoring: partial", "partial scoring needs labels"),
    ("scoring: likelihood", "scoring: all", "unknown scoring 'all'"),
    ("scoring: likelihood", 'scoring: likelihood\n    choices: "{words}"', "are `labels`, not `choices`"),
    ("max_new_tokens: 3", "max_new_tokens: 0", "max_new_tokens is 0, expected at least 1"),
    ("max_new_tokens: 3", 'separator: "\\n"', "ends at a line break, which belongs to `input`"),
    ('1: "very good"', '1: "bad luck"', "the choice 'bad' begins 'bad luck'"),
    ("max_new_tokens: 3", "max_tokens: 3", "Unknown key 'max_tokens'"),
    ("max_new_tokens: 3", "max_new_tokens: three", "max_new_tokens is 'three'"),
    ("metrics: [accuracy, f1]", "replace: {sentence: x}", "expected a mapping for each field"),
    ("metrics: [accuracy, f1]", "scoring: cloze", r"one \[MASK\] and at most one \[SEP\]"),
    ("scoring: likelihood", "scoring: cloze", "a cloze has labels"),
]


@pytest.mark.parametrize(("old", "new", "message"), INVALID_TASKS, ids=[new for _, new, _ in INVALID_TASKS])
def test_invalid_tasks_raise(old: str, new: str, message: str, folder: Path) -> None:
    text = TASK_YAML.replace(old, new)
    (folder / "tasks.yaml").write_text(text.replace("    metrics: [accuracy, f1]\n", "") if "round" in new else text)
    with pytest.raises(CtxError, match=message):
        read_tasks(folder / "tasks.yaml")


def test_field_value_replacement(folder: Path) -> None:
    (task,) = find_tasks("copa", folder)
    record = {"premise": "The man fell.", "choice1": "He slipped.", "choice2": "It rained.", "question": "cause"}
    (folder / "copa.jsonl").write_text(json.dumps({**record, "label": 0}))
    (example,) = task.read(str(folder / "copa.jsonl"))
    assert task.requests("", example)[0] == ("The man fell because", " he slipped.")
    (folder / "copa.jsonl").write_text(json.dumps({**record, "question": "why", "label": 0}))
    with pytest.raises(CtxError, match="'question' is 'why', expected cause, effect"):
        task.read(str(folder / "copa.jsonl"))


def test_packaged_tasks() -> None:
    names = [task.name for file in packaged_folder("prompts").glob("*.yaml") for task in find_tasks(file.stem)]
    expected = {"lambada", "copa", "wsc273", "boolq", "cb", "rte", "sst2", "story_cloze", "cbt_cn", "wic", "multirc"}
    assert expected | {"sst2_cloze_1", "rte_cloze_5", "boolq_cloze_6", "wic_cloze_3"} < {*names}
    assert len(names) == len(set(names))
    with pytest.raises(CtxError, match="did you mean lambada"):
        find_tasks("lambda")


@pytest.mark.slow
def test_packaged_tasks_read_real_data(shared_data: Path) -> None:
    """All packaged tasks whose files are in the folder; demonstrations end with the answer."""
    read_names = []
    for file in sorted(packaged_folder("prompts").glob("*.yaml")):
        for task in find_tasks(file.stem, shared_data):
            if all(Path(path).exists() for paths in task.text.files.values() for path in paths):
                examples = task.read("validation")
                assert len(examples) > 50
                answer = f"{examples[0].text.targets[0]}{examples[0].suffix}"
                demonstration = task.demonstration(examples[0]).rstrip()
                assert demonstration.endswith(answer.rstrip()) or (task.scoring == "cloze" and answer in demonstration)
                assert "[MASK]" not in demonstration
                read_names.append(task.name)
    assert len(read_names) >= 15


def save_model(family: str, auto_name: str, directory: Path) -> str:
    model, tokenizer = make_model(family, auto_name)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def run(folder: Path, **flags: Any) -> str:
    options = {"task": folder / "tasks.yaml", "tasks_folder": folder, "output_dir": folder / "out", **flags}
    return command_output("evaluate prompts", **options)


def test_interrupted_command_is_resumed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder and an encoder-decoder; an interrupted run is resumed; tables, figures and examples are saved."""
    gpt2 = save_model("gpt2", "AutoModelForCausalLM", folder / "gpt2")
    t5 = save_model("t5", "AutoModelForSeq2SeqLM", folder / "t5")
    flags = {"model": [gpt2, t5], "shots": [0, 1], "seeds": [0, 1], "unigram_text": folder / "train.tsv"}
    flags["save_examples"] = True
    evaluated: list[str] = []
    limit = 6

    def record_and_evaluate(*arguments: Any) -> PromptResult:
        if len(evaluated) == limit:
            raise KeyboardInterrupt
        evaluated.append(arguments[0].name)
        return evaluate_prompts(*arguments)

    monkeypatch.setattr("hf_ctxmodels.cli.evaluate_prompts.evaluate_prompts", record_and_evaluate)
    with pytest.raises(AssertionError, match="Interrupted"):
        run(folder, **flags)
    limit = 1000
    printed = run(folder, **flags)
    assert len(evaluated) == 2 * (4 * 3 + 2)  # each model: four tasks with three contexts, two unigram baselines
    assert "|mood" in printed
    assert (folder / "out" / "results.md").read_text() in printed
    assert not (folder / "out" / "prompts-partial.json").exists()
    result = AnalysisResult.load(folder / "out" / "prompts.json")
    cells = result.values["cells"]
    assert {(cell["model"], cell["shots"], cell["seed"]) for cell in cells if cell["task"] == "mood"} == {
        *((model, *run) for model in ("gpt2", "t5") for run in ((0, 0), (1, 0), (1, 1))),
        *((f"unigrams of {model}", 0, 0) for model in ("gpt2", "t5")),
        ("majority", 0, 0),
    }
    assert {figure.name for figure in result.figures} >= {"mood", "mood-size", "last"}
    records = [json.loads(line) for line in (folder / "out/examples/t5-last-1-1.jsonl").read_text().splitlines()]
    assert [record["continuations"] for record in records] == [[f" {text.split()[-1]}"] for text in TRAIN]


def test_file_without_labels(folder: Path) -> None:
    """Predictions equal those for the same examples with labels; there is no score."""
    gpt2 = save_model("gpt2", "AutoModelForCausalLM", folder / "gpt2")
    (folder / "words.tsv").write_text("\n".join(["sentence", *(text for text, _ in VALIDATION)]))
    questions = [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]
    (folder / "unlabeled.jsonl").write_text("\n".join(json.dumps({"question": row["question"]}) for row in questions))
    for name, file in (("mood", "words.tsv"), ("question", "unlabeled.jsonl"), ("last", "last.jsonl")):
        task, _ = read_task(folder, name)
        assert task.text.has_labels("validation")
        entry = TASK_YAML.partition(f"  {name}:\n")[2]
        entry = entry[: match.start()] if (match := re.search(r"^  \w", entry, re.M)) else entry
        (folder / f"{name}.yaml").write_text(f"tasks:\n  {name}:\n{entry}")
        flags = {"model": gpt2, "task": folder / f"{name}.yaml", "output_dir": folder / name}
        if name == "last":
            (folder / "contexts.jsonl").write_text(json.dumps({"context": "the cat saw a", "word": ""}))
            (folder / "last.yaml").write_text(
                (folder / "last.yaml").read_text().replace("format: lambada", "format: jsonl")
            )
            assert "likelihood of targets" in run(folder, **flags, evaluated_file=folder / "contexts.jsonl", fails=True)
            continue
        assert f"|{name}" in run(folder, **flags, save_examples=True)
        printed = run(folder, **flags | {"output_dir": folder / f"{name}-2"}, evaluated_file=folder / file)
        assert f"No labels, and so no score: {name}" in printed
        assert "|" not in printed
        expected, records = (
            [json.loads(line) for line in (out / "examples" / f"gpt2-{name}-0-0.jsonl").read_text().splitlines()]
            for out in (folder / name, folder / f"{name}-2")
        )
        for key in ("prediction", "log_probabilities") if name == "mood" else ("output",):
            assert [record[key] for record in records] == [record[key] for record in expected], key
    flags = {"model": gpt2, "task": folder / "mood.yaml", "evaluated_file": folder / "words.tsv", "shots": 1}
    run(folder, **flags, output_dir=folder / "shots")  # shots from file.train
    error = run(folder, **flags, output_dir=folder / "no-shots", shots_file=folder / "words.tsv", fails=True)
    assert "no labels for the examples in the contexts" in error


def test_command_with_masked_model(folder: Path) -> None:
    """Likelihood tasks are evaluated; tasks with generated answers raise."""
    bert = save_model("bert", "AutoModelForMaskedLM", folder / "bert")
    text = TASK_YAML.replace(TASK_YAML[TASK_YAML.index("  question:") : TASK_YAML.index("  schema:")], "")
    (folder / "likelihoods.yaml").write_text(text)
    assert "|last" in run(folder, model=bert, task=folder / "likelihoods.yaml", shots=1)
    flags = {"model": bert, "output_dir": folder / "other", "fails": True}
    gpt2 = save_model("gpt2", "AutoModelForCausalLM", folder / "gpt2")
    error = run(folder, **flags | {"model": [gpt2, bert]})
    assert "task question needs a model that generates text" in error
    assert f"--model {bert}" in error
    assert not (folder / "other").exists(), "nothing is computed"
    assert "for one task, not 4" in run(folder, **flags, evaluated_file=folder / "train.tsv")
    assert "Expected numbers from 0" in run(folder, **flags, shots=[0, -1])


@pytest.mark.parametrize(
    ("family", "auto_name", "message"),
    [
        ("elmo", "AutoModelForPreTraining", "does not predict texts from left to right"),
        ("mass", "AutoModel", "CtxMassModel, which is not a language model"),
        ("bert", "AutoModel", "CtxBertModel, which is not a language model"),
        ("glove", "AutoModelForPreTraining", "is not a language model"),
    ],
)
def test_models_without_likelihoods_raise(family: str, auto_name: str, message: str, folder: Path) -> None:
    tokenizer = FAMILIES[family].tokenizer.train(TRAIN * 5, vocab_size=300)
    Case(FAMILIES[family], auto_name).model(vocab_size=len(tokenizer)).save_pretrained(folder / family)
    tokenizer.save_pretrained(folder / family)
    assert message in run(folder, model=folder / family, fails=True)
