"""Tasks as text: packaged entries, readers, round trips of labels and numbers, metrics, and errors of entries and
files."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.table_files import Row
from hf_ctxmodels.downstream.text2text import TextTask
from hf_ctxmodels.downstream.text2text.templates import packaged_tasks, round_to_step

PACKAGED = {name: task for stem in packaged_tasks() for name, task in TextTask.from_yaml(stem).items()}
LABELLED = {name: task for name, task in PACKAGED.items() if isinstance(task.labels, dict)}


def make_task(tmp_path, text, lines):
    """A task `t` with an entry in YAML, and its examples of a JSONL or TSV file."""
    (tmp_path / "tasks.yaml").write_text("tasks:\n  t:\n" + "".join(f"    {line}\n" for line in text.split("\n")))
    file = tmp_path / ("train.jsonl" if lines and lines[0].startswith("{") else "train.tsv")
    file.write_text("".join(f"{line}\n" for line in lines))
    return TextTask.from_yaml(tmp_path / "tasks.yaml", tmp_path)["t"], file


def read_task(tmp_path, text, lines):
    task, file = make_task(tmp_path, text, lines)
    return task.read(file, is_training=True)


def label_row(task, value):
    """A row with a text in each field and a value as label."""
    fields = dict.fromkeys(task._fields(is_training=False), "a text")
    return Row(fields | {task._templates["target"].fields[0]: value}, "row")


def test_names_of_packaged_tasks_are_unique():
    names = [name for tasks in packaged_tasks().values() for name in tasks]
    assert len(names) == len({*names, *packaged_tasks()}) - len(packaged_tasks())
    assert set(TextTask.from_yaml("sst2")) == {"sst2"}


@pytest.mark.parametrize("name", LABELLED)
def test_labels_come_back_from_their_strings(name):
    """Also in lower case and with spaces around punctuation, as uncased tokenizers decode them."""
    task = LABELLED[name]
    values = [value == "true" if value in ("true", "false") else value for value in task.labels]
    examples = [task._make_examples(label_row(task, value), False)[0] for value in values]
    assert [example.label for example in examples] == list(range(len(task.labels)))
    for example in examples:
        assert task.parse(example, example.target) == example.label
        assert task.parse(example, f" {example.target.lower().replace('_', ' _ ')}\n") == example.label
        assert task.parse(example, f"{example.target} x") is None
    task.check_ranking(examples)
    assert task.score(examples, [example.target for example in examples])[task.metrics[0]] == 1


@given(st.floats(-10, 10, allow_nan=False), st.sampled_from([0.2, 0.1, 0.25, 0.5, 1.0, 2.0]))
def test_numbers_are_rounded_to_the_step(number, step):
    task = TextTask("t", input="{a}", target="{b}", round=step)
    (example,) = task._make_examples(Row({"a": "x", "b": number}, "row"), False)
    parsed = task.parse(example, example.target)
    assert example.label == number
    assert abs(parsed - number) <= step / 2 + 1e-9
    assert math.isclose(parsed / step, round(parsed / step), abs_tol=1e-9)
    assert round_to_step(parsed, step) == example.target


@pytest.mark.parametrize(("number", "text"), [(2.5, "2.4"), (0.7, "0.8"), (4.75, "4.8"), (5, "5.0"), (2.615, "2.6")])
def test_numbers_of_stsb(number, text):
    """`round(x * 5) / 5` of the released code; halves go to the even multiple."""
    assert round_to_step(number, 0.2) == text == f"{round(number * 5) / 5:.1f}"


@given(st.lists(st.sampled_from(["negative", "positive", "", "maybe", "3.x"]), min_size=1))
def test_unknown_outputs_are_counted_as_wrong(outputs):
    task = PACKAGED["sst2"]
    examples = task._make_examples(label_row(task, "1"), False) * len(outputs)
    scores = task.score(examples, outputs)
    assert scores["accuracy"] == outputs.count("positive") / len(outputs)
    known = outputs.count("positive") + outputs.count("negative")
    assert scores["unknown_outputs"] == pytest.approx(1 - known / len(outputs))


def test_unknown_outputs_of_other_metrics():
    """The opposite label in the F1 of two labels, -1 in correlations, as T5's evaluation."""
    mrpc = PACKAGED["mrpc"]
    examples = [mrpc._make_examples(label_row(mrpc, value), False)[0] for value in "0110"]
    equivalent = {0: "not_equivalent", 1: "equivalent"}
    scores = mrpc.score(examples, ["?", "?", equivalent[1], equivalent[0]])
    assert scores == {"f1": pytest.approx(0.5), "accuracy": 0.5, "unknown_outputs": 0.5}
    stsb = PACKAGED["stsb"]
    examples = [stsb._make_examples(label_row(stsb, value), False)[0] for value in ("1.0", "2.0", "-1")]
    assert stsb.score(examples, ["1.0", "2.0", "nan"])["pearsonr"] == pytest.approx(1)


def test_multirc_is_scored_by_question(tmp_path):
    """F1 over all answers, and questions with all answers correct."""
    questions = [
        {"question": "Q0", "idx": 0, "answers": [{"text": "a", "label": 1}, {"text": "<b>b</b>", "label": 0}]},
        {"question": "Q1", "idx": 1, "answers": [{"text": "c", "label": 1}]},
    ]
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"passage": {"text": "P.<br>S.", "questions": questions}}))
    task = PACKAGED["multirc"]
    examples = task.read(file)
    assert [example.input for example in examples] == [
        "multirc question: Q0 answer: a paragraph: P. S.",
        "multirc question: Q0 answer: b paragraph: P. S.",
        "multirc question: Q1 answer: c paragraph: P. S.",
    ]
    scores = task.score(examples, ["True", "True", "True"])
    assert scores == {"f1": pytest.approx(0.8), "group_exact_match": 0.5, "unknown_outputs": 0}


def test_record_has_an_example_per_answer_in_training(tmp_path):
    text = "Ann met Bob\n@highlight\nAnn won"
    entities = [{"start": 0, "end": 2}, {"start": 8, "end": 10}]
    query = {"query": "@placeholder won", "idx": 3, "answers": [{"text": name} for name in ("Bob", "Ann", "Ann")]}
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"passage": {"text": text, "entities": entities}, "qas": [query]}))
    task = PACKAGED["record"]
    first, second = task.read(file, is_training=True)
    assert first.input == "record query: @placeholder won entities: Ann, Bob passage: Ann met Bob. Ann won."
    assert (first.target, second.target, first.choices) == ("Ann", "Bob", ("Ann", "Bob"))
    (example,) = task.read(file)
    assert task.score([example], ["bob"]) == {"f1": 100, "exact_match": 100, "unknown_outputs": 0}


def test_wsc_trains_on_correct_referents_and_compares_words(tmp_path):
    def line(label, index):
        target = {"span1_text": "The city councilmen", "span2_text": "they", "span2_index": index}
        return json.dumps({"text": "The city councilmen met, for they feared it.", "target": target, "label": label})

    file = tmp_path / "wsc.jsonl"
    file.write_text("\n".join([line(True, 5), line(False, 6)]))
    task = PACKAGED["wsc"]
    assert [example.label for example in task.read(file, is_training=True)] == [1]
    examples = task.read(file)
    assert {example.input for example in examples} == {"wsc: The city councilmen met, for *they* feared it."}
    assert [example.label for example in examples] == [1, 0]
    assert task.score(examples, ["councilmen", "the mayor"])["accuracy"] == 1
    assert task.score(examples, ["councilmen's wives", ""]) == {"accuracy": 0, "unknown_outputs": 0.5}


LINES = ['{"text": "one", "label": 0}', '{"text": "two", "label": 1}']
ENTRY = 'input: "t: {text}"\ntarget: "{label}"\nlabels: {0: no, 1: yes}'


@pytest.mark.parametrize(
    ("text", "lines", "message", "location"),
    [
        (ENTRY, ['{"text": "one"}'], "No field 'label'", "train.jsonl:1"),
        (ENTRY, ["text\tclass", "one\t0"], "No column 'label'", "train.tsv"),
        (ENTRY, [*LINES, '{"text": "x", "label": 2}'], "Unknown label '2'", "train.jsonl:3"),
        (ENTRY, ['{"text": null, "label": 0}'], "The field 'text' is None", "train.jsonl:1"),
        (ENTRY.replace("yes", "no"), LINES, "The labels 0 and 1 have the same string 'no'", "t, labels, 1"),
        (ENTRY.replace("yes", '""'), LINES, "The label string '' is empty", "t, labels, 1"),
        (ENTRY.replace("{0: no, 1: yes}", '"{text}"'), LINES, "expected a list of two or more", "train.jsonl:1"),
        (ENTRY.replace("labels", "lables"), LINES, "Unknown key 'lables'", "tasks.yaml:5, lables"),
        (ENTRY.replace("{text}", "{text"), LINES, "Not a template", "t, input"),
        (ENTRY.replace("{text}", "text"), LINES, "the input has no field", "t, input"),
        (ENTRY.replace('"{label}"', '"the {label}"'), LINES, "the target is more than one field", "t, target"),
        (ENTRY + "\nformat: xml", LINES, "unknown format 'xml'", "t, format"),
        (ENTRY + "\nmetrics: [rouge]", LINES, "the metric rouge is for the kind text", "t, metrics"),
        (ENTRY + "\nmetrics: [acuracy]", LINES, "unknown metric 'acuracy'", "t, metrics"),
        (ENTRY + "\nmetrics: [group_exact_match]", LINES, "needs a group", "t, metrics"),
        (ENTRY + "\ntrain_filter: {label: 7}", LINES, "No example has", "train.jsonl"),
        ('input: "{text}"\ntarget: "{label}"\nround: none', LINES, "round is 'none', expected a number", "5, round"),
        ('input: "{text}"\ntarget: "{text}"\nround: 0.5', LINES, "Expected a number, got 'one'", "train.jsonl:1"),
        ('input: "{text}"\ntarget: "{label}"', ['{"text": "x", "label": " "}'], "The target is empty", "train.jsonl:1"),
        ('input: "{text}"\ntarget: "{label}"', ['{"text": "x", "label": []}'], "The target is empty", "train.jsonl:1"),
        ('input: "{text}"', LINES, "The task t has no target", "tasks.yaml:2"),
    ],
)
def test_errors_name_the_place(tmp_path, text, lines, message, location):
    with pytest.raises(CtxError) as caught:
        read_task(tmp_path, text, lines)
    assert message in caught.value.message
    assert location in caught.value.location
    assert caught.value.hint


def test_labels_that_begin_another_label_cannot_be_ranked_without_an_end(tmp_path):
    task, file = make_task(tmp_path, ENTRY.replace("yes", "not sure"), LINES)
    examples = task.read(file)
    assert [task.parse(example, example.target) for example in examples] == [0, 1]  # equal texts are no problem
    with pytest.raises(CtxError, match="'no' is the beginning of 'not sure'"):
        task.check_ranking(examples)


def test_choices_of_each_example(tmp_path):
    text = 'input: "{premise}"\ntarget: "{label}"\nlabels: {1: "{first}", 2: "so {second}"}'
    task, file = make_task(tmp_path, text, ["premise\tfirst\tsecond\tlabel", "It rains.\twet\tdry\t2"])
    (example,) = task.read(file)
    assert example.choices == ("wet", "so dry")
    assert example.target == "so dry"
    assert example.label == 1
    text = 'input: "{text}"\ntarget: "{gold}"\nlabels: "{options}"'
    task, file = make_task(tmp_path, text, ['{"text": "x", "options": ["a", "b"], "gold": 1}'])
    assert task.read(file)[0].target == "b"
