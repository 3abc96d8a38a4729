"""Text-to-text tasks: packaged entries, readers, parsing of outputs, metrics and errors."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.table_files import Row
from hf_ctxmodels.downstream.text2text import TextTask
from hf_ctxmodels.downstream.text2text.metrics import deca_score
from hf_ctxmodels.downstream.text2text.task_files import packaged_tasks
from hf_ctxmodels.downstream.text2text.text_task import round_to_step

PACKAGED = {name: task for stem in packaged_tasks() for name, task in TextTask.from_yaml(stem).items()}
LABELED = {name: task for name, task in PACKAGED.items() if isinstance(task.labels, dict)}


def make_task(tmp_path, text, lines):
    """A task `t` with a YAML entry, and its JSONL or TSV file."""
    (tmp_path / "tasks.yaml").write_text("tasks:\n  t:\n" + "".join(f"    {line}\n" for line in text.split("\n")))
    file = tmp_path / ("train.jsonl" if lines and lines[0].startswith("{") else "train.tsv")
    file.write_text("".join(f"{line}\n" for line in lines))
    return TextTask.from_yaml(tmp_path / "tasks.yaml", tmp_path)["t"], file


def read_task(tmp_path, text, lines):
    task, file = make_task(tmp_path, text, lines)
    return task.read(file, is_training=True)


def label_row(task, value):
    """A row with text in each field and the given label."""
    fields = dict.fromkeys(task._fields(is_training=False), "a text")
    return Row(fields | {task._templates["target"].fields[0]: value}, "row")


def test_names_of_packaged_tasks_are_unique():
    names = [name for tasks in packaged_tasks().values() for name in tasks]
    assert len(names) == len({*names, *packaged_tasks()}) - len(packaged_tasks())
    assert set(TextTask.from_yaml("sst2")) == {"sst2"}


@pytest.mark.parametrize("name", LABELED)
def test_label_strings_are_parsed(name):
    """Also in lower case and with spaces around punctuation, as uncased tokenizers decode them."""
    task = LABELED[name]
    values = [value == "true" if value in ("true", "false") else value for value in task.labels]
    examples = [task.make_examples(label_row(task, value))[0] for value in values]
    assert [example.label for example in examples] == list(range(len(task.labels)))
    for example in examples:
        assert task.parse(example, example.target) == example.label
        assert task.parse(example, f" {example.target.lower().replace('_', ' _ ')}\n") == example.label
        assert task.parse(example, f"{example.target} x") is None
    assert task.score(examples, [example.target for example in examples])[task.metrics[0]] == 1


@given(st.lists(st.text(min_size=1).filter(lambda text: text == text.strip()), min_size=2, max_size=5, unique=True))
def test_distinct_label_strings_are_parsed(texts):
    """Also strings that differ only in case or spaces, or are prefixes of other strings."""
    labels = {str(value): text.replace("{", "{{").replace("}", "}}") for value, text in enumerate(texts)}
    task = TextTask("t", input="{a}", target="{b}", labels=labels)
    for index, text in enumerate(texts):
        (example,) = task.make_examples(Row({"a": "x", "b": index}, "row"))
        assert (example.label, example.target) == (index, text)
        assert task.parse(example, f"{text}\n") == index


@given(st.floats(-10, 10, allow_nan=False), st.sampled_from([0.2, 0.1, 0.25, 0.5, 1.0, 2.0]))
def test_numbers_are_rounded_to_step(number, step):
    task = TextTask("t", input="{a}", target="{b}", round=step)
    (example,) = task.make_examples(Row({"a": "x", "b": number}, "row"))
    parsed = task.parse(example, example.target)
    assert example.label == number
    assert abs(parsed - number) <= step / 2 + 1e-9
    assert math.isclose(parsed / step, round(parsed / step), abs_tol=1e-9)
    assert round_to_step(parsed, step) == example.target


@pytest.mark.parametrize(("number", "rounded"), [(2.5, "2.4"), (0.7, "0.8"), (4.75, "4.8"), (5, "5.0"), (2.615, "2.6")])
def test_stsb_rounding(number, rounded):
    """As `round(x * 5) / 5` of the released code; ties round to the even multiple."""
    assert round_to_step(number, 0.2) == rounded == f"{round(number * 5) / 5:.1f}"


@given(st.lists(st.sampled_from(["negative", "positive", "", "maybe", "3.x"]), min_size=1))
def test_unknown_outputs_are_counted_as_wrong(outputs):
    task = PACKAGED["sst2"]
    examples = task.make_examples(label_row(task, "1")) * len(outputs)
    scores = task.score(examples, outputs)
    assert scores["accuracy"] == outputs.count("positive") / len(outputs)
    num_known = outputs.count("positive") + outputs.count("negative")
    assert scores["unknown_outputs"] == pytest.approx(1 - num_known / len(outputs))


def test_unknown_outputs_of_other_metrics():
    """They count as the opposite label in binary F1 and as -1 in correlations, as in T5's evaluation."""
    mrpc = PACKAGED["mrpc"]
    examples = [mrpc.make_examples(label_row(mrpc, value))[0] for value in "0110"]
    equivalent = {0: "not_equivalent", 1: "equivalent"}
    scores = mrpc.score(examples, ["?", "?", equivalent[1], equivalent[0]])
    assert scores == {"f1": pytest.approx(0.5), "accuracy": 0.5, "unknown_outputs": 0.5}
    stsb = PACKAGED["stsb"]
    examples = [stsb.make_examples(label_row(stsb, value))[0] for value in ("1.0", "2.0", "-1")]
    assert stsb.score(examples, ["1.0", "2.0", "nan"])["pearsonr"] == pytest.approx(1)


def test_multirc_is_scored_by_question(tmp_path):
    """F1 over all answers, and the share of questions with all answers correct."""
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


def test_record_has_one_training_example_per_answer(tmp_path):
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
        (ENTRY, ['{"text": "x", "label": -1}'] * 2, "All 2 labels in 'label' are -1", "train.jsonl:1"),
        (
            'input: "{text}"\ntarget: "{label}"\nround: 1',
            ['{"text": "x", "label": -1}'] * 2,
            "All 2 labels in 'label' are -1",
            "train.jsonl:1",
        ),
        (ENTRY, ['{"text": null, "label": 0}'], "The field 'text' is None", "train.jsonl:1"),
        (ENTRY.replace("yes", "no"), LINES, "The labels 0 and 1 have the same string 'no'", "t, labels, 1"),
        (ENTRY.replace("yes", '""'), LINES, "The label string '' is empty", "t, labels, 1"),
        (ENTRY.replace("{0: no, 1: yes}", '"{text}"'), LINES, "expected a list of two or more", "train.jsonl:1"),
        (ENTRY.replace("labels", "lables"), LINES, "Unknown key 'lables'", "tasks.yaml:5, lables"),
        (ENTRY.replace("{text}", "{text"), LINES, "Not a template", "t, input"),
        (ENTRY.replace("{text}", "text"), LINES, "the input has no field", "t, input"),
        (ENTRY.replace('"{label}"', '"the {label}"'), LINES, "the target is not a single field", "t, target"),
        (ENTRY.replace('"{label}"', '"yes"'), LINES, "the target is not a single field", "t, target"),
        (ENTRY + "\nno_answer: none", LINES, "a classification task does not read no_answer", "t, no_answer"),
        (ENTRY + '\nlabel: "{label}"', LINES, "label is only read with postprocess: referent", "t, label"),
        (ENTRY + "\nexpand: a.b", LINES, "no object or list 'a' on the path", "train.jsonl:1"),
        (ENTRY + "\nexpand: text", ["text\tlabel", "one\t0"], "The format tsv has no lists", "train.tsv"),
        (ENTRY + "\nformat: xml", LINES, "unknown format 'xml'", "t, format"),
        (ENTRY + "\nmetrics: [rouge]", LINES, "the metric rouge is for the kind text", "t, metrics"),
        (ENTRY.replace("{text}", "{text!r}"), LINES, "or a conversion", "t, input"),
        ('input: "{text}"\ntarget: "{label}"\nmetrics: [squad, exact_match]', LINES, "of the same name", "t, metrics"),
        (ENTRY + "\nmetrics: [acuracy]", LINES, "unknown metric 'acuracy'", "t, metrics"),
        ('input: "{text}"\ntarget: "{label}"\nround: 1\nmetrics: [mse]', LINES, "a lower mse is better", "t, metrics"),
        (ENTRY.replace("1: yes", "0: yes"), LINES, "'0' occurs twice, first in line 5", "tasks.yaml:5"),
        (ENTRY.replace("1: yes", "'0': yes"), LINES, "'0' occurs twice, first in line 5", "tasks.yaml:5"),
        (ENTRY + "\nfile: {dev: a.jsonl}", LINES, "Unknown key 'dev' in `file` of the task t", "dev"),
        (ENTRY + "\nmetrics: [group_exact_match]", LINES, "needs a group", "t, metrics"),
        (ENTRY + "\ntrain_filter: {label: 7}", LINES, "No example has", "train.jsonl"),
        ('input: "{text}"\ntarget: "{label}"\nround: none', LINES, "round is 'none', expected a number", "5, round"),
        ('input: "{text}"\ntarget: "{text}"\nround: 0.5', LINES, "Expected a number, got 'one'", "train.jsonl:1"),
        ('input: "{text}"\ntarget: "{label}"', ['{"text": "x", "label": " "}'], "The target is empty", "train.jsonl:1"),
        ('input: "{text}"\ntarget: "{label}"', ['{"text": "x", "label": []}'], "The target is empty", "train.jsonl:1"),
        ('input: "{text}"', LINES, "The task t has no target", "tasks.yaml:2"),
    ],
)
def test_errors_report_location(tmp_path, text, lines, message, location):
    with pytest.raises(CtxError) as error:
        read_task(tmp_path, text, lines)
    assert message in error.value.message
    assert location in error.value.location
    assert error.value.hint


def test_label_prefixes_are_distinguished(tmp_path):
    task, file = make_task(tmp_path, ENTRY.replace("yes", "not sure"), LINES)
    assert [task.parse(example, example.target) for example in task.read(file)] == [0, 1]


def test_choices_per_example(tmp_path):
    text = 'input: "{premise}"\ntarget: "{label}"\nlabels: {1: "{first}", 2: "so {second}"}'
    task, file = make_task(tmp_path, text, ["premise\tfirst\tsecond\tlabel", "It rains.\twet\tdry\t2"])
    (example,) = task.read(file)
    assert example.choices == ("wet", "so dry")
    assert example.target == "so dry"
    assert example.label == 1
    text = 'input: "{text}"\ntarget: "{gold}"\nlabels: "{options}"'
    task, file = make_task(tmp_path, text, ['{"text": "x", "options": ["a", "b"], "gold": 1}'])
    assert task.read(file)[0].target == "b"
    task, file = make_task(
        tmp_path, text, [f'{{"text": "x", "options": ["2", "1"], "gold": {gold}}}' for gold in ("1", '"1"', '"0"')]
    )
    assert [example.target for example in task.read(file)] == ["1", "1", "2"]  # index, text, index as text


def test_lists_are_joined_or_used_as_references(tmp_path):
    text = 'input: "{parts:; } {{x}}"\ntarget: "{answers}"\nno_answer: none\nmetrics: [squad, rouge]'
    lines = ['{"parts": ["a", "b"], "answers": ["one", "two words", "one"]}', '{"parts": ["c"], "answers": []}']
    task, file = make_task(tmp_path, text, lines)
    examples = task.read(file)
    assert [(example.input, example.target) for example in examples] == [("a; b {x}", "one"), ("c {x}", "none")]
    assert examples[0].targets == ("one", "two words")
    scores = task.score(examples, ["two words", "one"])
    assert (scores["f1"], scores["rouge1"], scores["exact_match"]) == (50, 0.5, 50)


def test_tag_sequences_have_sentence_length(tmp_path):
    """Missing tags are O, and surplus tags are dropped."""
    file = tmp_path / "dev.txt"
    file.write_text("EU NNP X I-ORG\nsaid VBD X O\n\nPeter NNP X I-PER\nBlack NNP X I-PER\nleft VBD X O\n")
    ner = PACKAGED["conll_ner"]
    examples = ner.read(file)
    assert [(example.input, example.target) for example in examples] == [
        ("ner: EU said", "B-ORG O"),
        ("ner: Peter Black left", "B-PER I-PER O"),
    ]
    assert ner.score(examples, [example.target for example in examples])["f1"] == 1
    scores = ner.score(examples, ["B-ORG O O", "B-PER"])
    assert (scores["precision"], scores["recall"], scores["accuracy"]) == (0.5, 0.5, 0.8)
    pos = PACKAGED["conll_pos"]
    assert pos.score(pos.read(file), ["NNP VBD", "NNP NNP NNP"])["tag_accuracy"] == 0.8


def test_parallel_files_are_aligned_by_line(tmp_path):
    files = [tmp_path / "a.en", tmp_path / "a.de"]
    files[0].write_text("One.\nTwo.\n")
    files[1].write_text("Eins.\nZwei.\n")
    task = PACKAGED["translate_en_de"]
    assert [example.target for example in task.read(files)] == ["Eins.", "Zwei."]
    files[1].write_text("Eins.\n")
    with pytest.raises(CtxError, match="2, 1 lines"):
        task.read(files)


def test_dpr_marks_pronoun_and_validates_blocks(tmp_path):
    file = tmp_path / "dpr.txt"
    file.write_text("The bee saw Itta, it left.\nit\nThe bee,Itta\nthe bee\n\n")
    (example,) = PACKAGED["dpr"].read(file)
    assert (example.input, example.target) == ("wsc: The bee saw Itta, *it* left.", "The bee")
    with file.open("a") as blocks:
        blocks.write("The bee left.\nit\nThe bee\nThe bee\n")
    with pytest.raises(CtxError, match="two candidates") as error:
        PACKAGED["dpr"].read(file)
    assert error.value.location == f"{file}:6"


def test_deca_score_adds_percentages():
    metrics = {"a": "accuracy", "b": "rouge", "c": "squad", "d": "bleu", "e": "exact_match"}
    scores = {"a_accuracy": 0.5, "b_rouge1": 0.3, "b_rouge2": 0.1, "b_rougeL": 0.2, "c_f1": 40.0, "c_exact_match": 30.0}
    scores |= {"d_bleu": 7.0, "e_exact_match": 0.25, "a_unknown_outputs": 1.0}
    assert deca_score(metrics, scores) == pytest.approx(50 + 20 + 40 + 7 + 25)


def test_file_urls_are_unchanged(tmp_path):
    task, _ = make_task(tmp_path, ENTRY + '\nfile: {train: "https://a.org/b.tsv", validation: dev.tsv}', LINES)
    assert task.files == {"train": ("https://a.org/b.tsv",), "validation": (str(tmp_path / "dev.tsv"),)}


def test_missing_files_and_splits_raise():
    with pytest.raises(CtxError, match=r"no such file: nowhere/.*SST-2/dev.tsv(.|\n)*--tasks_folder"):
        TextTask.from_yaml("sst2", "nowhere")["sst2"].read("validation")
    with pytest.raises(CtxError, match="no file of the split 'test'"):
        PACKAGED["cola"].read("test")


@pytest.mark.parametrize("name", ["sst3", "glu", "missing.yaml"])
def test_unknown_task_name_raises(name):
    with pytest.raises(CtxError, match="neither a file nor a packaged task"):
        TextTask.from_yaml(name)


SIZES = {
    "cola": (8551, 527),
    "sst2": (6920, 872, 1821),
    "mrpc": (4076, 1725),
    "stsb": (5749, 1500, 1379),
    "mnli": (None, 9815),
    "rte": (2490, 277),
    "cb": (32, 56),
    "copa": (400, 100),
    "boolq": (32, 2176),
    "wic": (32, 426),
    "multirc": (154, 3218),
    "record": (44, 32),
    "wsc": (32, 104),
    "dpr": (1322,),
    "squad2": (None, 4002),
    "xquad_en": (1190,),
    "xquad_de": (1190,),
    "covidqa": (1370,),
    "translate_en_de": (29000, 1014, 1000),
    "translate_en_fr": (29000, 1014, 1000),
    "translate_de_en": (29000, 1014, 1000),
    "translate_fr_en": (29000, 1014, 1000),
    "scitldr": (1992, 619),
    "billsum": (67,),
    "wikisplit": (5000, 1000),
    "conll_ner": (14041, 3250, 3453),
    "conll_pos": (14041, 3250, 3453),
    "conll_chunks": (8936, 2012),
    "wnut_ner": (3394, 1009, 1287),
    "ewt_pos": (12544, 2001, 2077),
    "snli": (None, 9842),
    "sick": (4500, 500, 4927),
    "sick_relatedness": (4500, 500, 4927),
    "movie_reviews": (2000,),
    "deca_translation": (29000, 1014),
    "deca_summary": (1992, 619),
    "deca_mnli": (None, 9815),
    "deca_sst": (6920, 872),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_packaged_tasks_read_real_files(shared_data, name):
    """All examples are read, and labels and numbers are parsed from their strings."""
    task = TextTask.from_yaml(name, shared_data)[name]
    for split, num_examples in zip(task.files, SIZES[name], strict=True):
        if num_examples is None:
            continue
        examples = task.read(split)
        assert len(examples) == num_examples
        outputs = [example.target for example in examples]
        parsed = [task.parse(example, output) for example, output in zip(examples, outputs, strict=True)]
        if task.kind == "classification":
            assert parsed == [example.label for example in examples]
        elif task.kind == "number":
            assert (
                max(abs(p - example.label) for p, example in zip(parsed, examples, strict=True))
                <= task.round / 2 + 1e-9
            )
        assert None not in parsed


@pytest.mark.slow
def test_sizes_cover_all_shared_files(shared_data):
    tasks = {name: task for stem in packaged_tasks() for name, task in TextTask.from_yaml(stem, shared_data).items()}
    available = {name for name, task in tasks.items() if any(Path(files[0]).exists() for files in task.files.values())}
    assert available == set(SIZES)


@pytest.mark.parametrize(
    ("name", "labeled", "unlabeled"),
    [
        ("sst2", "sentence\tlabel\na film\t1\n", ["sentence\na film\n", "sentence\tlabel\na film\t-1\n"]),
        ("stsb", "a cat,a dog,1.5\n", ["a cat,a dog\n", "a cat,a dog,\n"]),
        ("conll_ner", "Ann NNP B-NP B-PER\nran VBD B-VP O\n", ["Ann\nran\n", "Ann NNP B-NP\nran VBD B-VP\n"]),
        ("ewt_pos", "1\tcat\tcat\tNOUN" + "\t_" * 6 + "\n", ["1\tcat\tcat\t_" + "\t_" * 6 + "\n"]),
        (
            "wsc",
            '{"text": "Ann saw it.", "target": {"span1_text": "Ann", "span2_text": "it", "span2_index": 2}, '
            '"label": true}',
            ['{"text": "Ann saw it.", "target": {"span1_text": "Ann", "span2_text": "it", "span2_index": 2}}'],
        ),
        (
            "squad",
            '{"data": [{"paragraphs": [{"context": "Ann ran.", "qas": [{"id": "1", "question": "Who?", "answers": '
            '[{"text": "Ann", "answer_start": 0}]}]}]}]}',
            ['{"data": [{"paragraphs": [{"context": "Ann ran.", "qas": [{"id": "1", "question": "Who?"}]}]}]}'],
        ),
    ],
)  # fmt: skip
def test_files_without_labels(tmp_path, name, labeled, unlabeled):
    """Inputs and choices equal those of labeled files."""
    task = PACKAGED[name]
    suffix = {"sst2": "tsv", "stsb": "csv", "squad": "json", "wsc": "jsonl", "ewt_pos": "conllu"}.get(name, "txt")
    file = tmp_path / f"labeled.{suffix}"
    file.write_text(labeled)
    assert task.has_labels(file)
    (expected,) = task.read(file, is_training=False)
    for text in unlabeled:
        file = tmp_path / f"unlabeled.{suffix}"
        file.write_text(text)
        assert not task.has_labels(file), text
        (example,) = task.read(file, is_training=False, labeled=False)
        assert (example.targets, example.label) == ((), None)
        assert example.target == ("Ann" if name == "wsc" else "")
        assert (example.input, example.choices) == (expected.input, expected.choices)
