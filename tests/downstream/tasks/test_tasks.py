"""Tables, classification, regression, multiple choice and ranking: reading, encoding and errors."""

import gzip
import json
from dataclasses import fields

import fsspec
import numpy as np
import pytest
import torch
from task_files import make_task, write_file

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.table_files import read_table, read_texts
from hf_ctxmodels.downstream.tasks import TASKS, TaskArguments
from hf_ctxmodels.models.bert.configuration_bert import CtxBertConfig

QUOTED = [{"text": 'a "b", c\r\nd', "label": "1"}, {"text": "e", "label": "0"}]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.csv", 'label,text\r\n1,"a ""b"", c\r\nd"\r\n0,e\r\n', QUOTED),
        ("a.csv", "label,text\r1,one\r0,two\r", [{"label": "1", "text": "one"}, {"label": "0", "text": "two"}]),
        ("a.csv.gz", 'label,text\n1,"a ""b"", c\r\nd"\n0,e\n', QUOTED),
        ("a.jsonl", '{"label": "1", "text": "a \\"b\\", c\\r\\nd"}\n\n{"text": "e", "label": "0", "x": 1}\n', QUOTED),
        ("a.tsv.gz", '\ufefftext\tlabel\n"so said he\t1\n', [{"text": '"so said he', "label": "1"}]),  # a literal quote
        ("a.txt", "x\t1\tone\nx\t0\ttwo\n", [{"3": "one", "2": "1"}, {"3": "two", "2": "0"}]),  # without a header
        ("a.txt", "x\t1\tone\nx\t0\ttwo\n", [{"-1": "one", "2": "1"}, {"-1": "two", "2": "0"}]),
    ],
)
def test_tables_are_read(tmp_path, name, text, expected):
    rows = read_table(write_file(tmp_path / name, text), list(expected[0]))
    assert [row.values for row in rows] == expected


def test_whitespace_around_labels_is_reported(tmp_path, capsys):
    file = write_file(tmp_path / "a.csv", "text,label\nx,a\ny,a \nz,b\n")
    examples = make_task("sequence-classification").read_file(str(file))
    assert [example.label for example in examples] == ["a", "a", "b"]
    errors = capsys.readouterr().err
    assert "1 labels" in errors
    assert f"'a ' in {file}:3" in errors


def test_integers_as_floating_point_numbers_are_labels(tmp_path):
    """pandas stores the integers of a column with missing values as floating-point numbers."""
    file = write_file(tmp_path / "a.jsonl", "".join(f'{{"text": "x", "label": {n}}}\n' for n in ("1.0", "0", "0.5")))
    assert [example.label for example in make_task("sequence-classification").read_file(file)] == ["1", "0", "0.5"]


def test_carriage_returns_end_lines_only_without_line_feeds(tmp_path):
    for content, texts in (
        ("one\rtwo\r\rthree", ["one", "two", "three"]),
        ("one\rtwo\nthree\n", ["one\rtwo", "three"]),
    ):
        file = write_file(tmp_path / "a.txt", content)
        assert [row.values["text"] for row in read_texts(file, "text")] == texts


def test_rows_have_line_numbers(tmp_path):
    file = write_file(tmp_path / "a.csv", 'text\n"one\ntwo"\nthree\n')
    assert [row.location for row in read_table(file, ["text"])] == [f"{file}:2", f"{file}:4"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "empty"),
        ("a.csv", "text,label\n", "No examples"),
        ("a.csv", "text;label\nx;1\n", r"(?s)separated by semicolons: 'text;label'.*use commas in .csv"),
        ("a.csv", "text\tlabel\nx\t1\n", r"separated by tabs"),
        ("a.tsv", '"text","label"\nx,1\n', r"separated by commas"),
        ("a.csv", "sentence,gold\nx,1\n", r"No column 'text'. The columns are: 'sentence', 'gold'"),
        ("a.jsonl", '{"sentence": "x"}', r"No column 'text'. The columns are: 'sentence'"),
        ("a.csv", "text,text,label\nx,y,1\n", r"(?s)2 columns are named 'text'.*a\.csv"),
        ("a.csv", "text,label\nx,y,1\n", r"(?s)3 columns, expected 2.*a.csv:2.*double quotes"),
        (
            "a.csv",
            'label,text\n1,one\n0,"two\n1,three\n',
            r"(?s)unexpected end of data.*a.csv:3.*add the closing quote",
        ),
        ("a.csv", 'label,text\n0,"two\n1,"three"\n', r"(?s)',' expected after.*a.csv:2"),
        ("a.jsonl", '{"text": "x", "label": 1}\n{"text"\n', r"(?s)JSON.*a.jsonl:2"),
        ("a.jsonl", "[1]\n", "Expected an? .*object, got list"),
        ("a.xls", "x", r"(?s)Not a table.*\.csv"),
        ("a.json", "{}", r"(?s)Not a table.*json"),
        ("none.csv", None, "No such file"),
        (".", None, "directory .* doesn't contain any data files"),
        ("a.tsv", "text\tlabel\ncafé\t1\n".encode("latin-1"), r"(?s)byte 14 is 0xe9.*a\.tsv.*iconv -f WINDOWS-1252"),
        ("a.tsv", "text\tlabel\nx\t1\n".encode("utf-16"), r"(?s)byte 0 is 0xff.*a\.tsv.*iconv -f UTF-16"),
        ("a.tsv", b"\xfe\xff" + "text".encode("utf-16-be"), r"(?s)byte 0 is 0xfe.*a\.tsv.*iconv -f UTF-16"),
        (
            "a.tsv.gz",
            gzip.compress("text\tlabel\ncafé\t1\n".encode("latin-1"), mtime=0),
            r"(?s)byte 14 is 0xe9.*a\.tsv.*iconv",
        ),
        ("a.tsv.gz", gzip.compress(b"text\tlabel\n" * 99, mtime=0)[:-9], r"(?s)The gzip file is damaged.*a\.tsv\.gz"),
    ],
)
def test_invalid_table_error_and_location(tmp_path, name, text, message):
    if isinstance(text, bytes):
        (tmp_path / name).write_bytes(text)
    elif text is not None:
        write_file(tmp_path / name, text)
    with pytest.raises(CtxError, match=message):
        make_task("sequence-classification").read(str(tmp_path / name), "train")


def test_labels_are_sorted_and_saved_in_config(tmp_path, tokenizer):
    file = write_file(tmp_path / "a.tsv", "text\tlabel\nThe cat\t10\nA dog\t9\nNobody saw\t10\n")
    task = make_task("sequence-classification")
    examples = task.read(file, "train")
    config = CtxBertConfig()
    task.configure(config, examples, examples)
    assert config.id2label == {0: "9", 1: "10"}
    assert config.num_labels == 2
    encoded = task.encode(examples, tokenizer)
    assert [feature["labels"] for feature in encoded.features] == [1, 0, 1]
    batch = task.collator(tokenizer)([feature | {"epoch": 0, "example_index": 3} for feature in encoded.features])
    assert set(batch) == {"input_ids", "token_type_ids", "attention_mask", "labels"}

    outputs = [{"logits": np.array(row)} for row in ([0.0, 1.0], [0.0, 1.0], [2.0, 1.0])]
    predictions = task.decode(examples, encoded, outputs)
    assert predictions == ["10", "10", "9"]
    assert task.score(examples, predictions)["accuracy"] == pytest.approx(1 / 3)
    assert task.baseline(examples, examples[:2]) == ["10", "10"]

    continued = make_task("sequence-classification")
    continued.configure(config, examples[:2], [])  # continued fine-tuning keeps the numbering of the head
    assert continued.labels == ["9", "10"]


def test_pairs_are_truncated_longest_first(tmp_path, tokenizer):
    file = write_file(tmp_path / "a.csv", f"a,b,label\n{'The cat ' * 20},A dog,1\nA dog,The cat,0\n")
    task = make_task("sequence-classification", text_columns="a,b", max_length=12)
    examples = task.read(file, "train")
    task.configure(CtxBertConfig(), examples, [])
    feature = task.encode(examples, tokenizer).features[0]
    assert len(feature["input_ids"]) == 12
    assert tokenizer.decode(feature["input_ids"]).endswith("[SEP] a dog [SEP]")


def test_spaces_around_labels_are_removed(tmp_path):
    file = write_file(tmp_path / "a.csv", "text,label\nx,a\ny,a \nz, b\n")
    examples = TASKS["sequence-classification"](TaskArguments()).read(str(file), "train")
    assert [example.label for example in examples] == ["a", "a", "b"]
    file = write_file(tmp_path / "a.conll", "Anna\tB-PER \nsaw\tO\n")
    (example,) = TASKS["token-classification"](TaskArguments()).read(str(file), "train")
    assert [*example.tags] == ["B-PER", "O"]


def test_validation_on_training_file_warns(tmp_path, capsys):
    file = write_file(tmp_path / "a.csv", "text,label\nx,a\n")
    copy = write_file(tmp_path / "b.csv", "text,label\nx,a\n")
    task = TASKS["sequence-classification"](TaskArguments())
    task.read_splits([str(file)], str(copy))
    task.read_splits([f"file://{file}"], f"file://{copy}")
    assert "warning" not in capsys.readouterr().err
    for same_file in (str(file), f"file://{file}"):
        task.read_splits([str(copy), str(file)], same_file)
        assert "is the training file and the validation file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "name", "content"),
    [
        ("token-classification", "a.conllu", "1\tGo\tgo\tVERB\t_\t_\t0\troot\t_\t_\n"),
        ("semantic-role-labeling", "b.jsonl", '{"tokens": ["Go"], "predicate": 0, "tags": ["B-V"]}'),
        (
            "question-answering",
            "c.json",
            '{"data": [{"paragraphs": [{"context": "x", "qas": [{"id": 1, "question": "y", "answers": []}]}]}]}',
        ),
    ],
)
def test_query_of_a_url_is_not_part_of_the_suffix(task, name, content):
    fsspec.filesystem("memory").pipe(f"/{name}?download=1", content.encode())
    assert len(make_task(task).read(f"memory://{name}?download=1", "train")) == 1


@pytest.mark.parametrize(
    ("task", "line", "message"),
    [
        ("sequence-classification", '{"text": "x", "label": null}', "None is not a label"),
        ("sequence-classification", '{"text": null, "label": 1}', "Expected a text in column 'text', got None"),
        ("sequence-classification", '{"text": "  ", "label": 1}', "No text in column"),
        ("regression", '{"text": "x", "label": "high"}', "'high' is not a finite number"),
        ("regression", '{"text": "x", "label": NaN}', "nan is not a finite number"),
        ("regression", '{"text": "x", "label": true}', "True is not a finite number"),
        ("regression", '{"text": "x", "label": "1_000"}', "'1_000' is not a finite number"),
        ("multiple-choice", '{"text": "x", "choices": ["a", "b"], "label": false}', "label False is not an index"),
        ("regression", '{"text": "x", "label": 1' + 400 * "0" + "}", "is not a finite number"),
        ("regression", '{"text": "x", "label": "1e999"}', "'1e999' is not a finite number"),
        (
            "multiple-choice",
            '{"text": "x", "choices": ["a", "b"], "label": 2}',
            "label 2 is not an index of the 2 choices",
        ),
        ("multiple-choice", '{"text": "x", "choices": ["a", "b"], "label": "A"}', "label 'A' is not an index"),
        ("multiple-choice", '{"text": "x", "choices": ["a"], "label": 0}', "Expected 2 strings"),
        ("multiple-choice", '{"text": "x", "choices": "ab", "label": 0}', "Expected 2 strings"),
    ],
)
def test_invalid_example_error_reports_line(tmp_path, task, line, message):
    file = write_file(tmp_path / "a.jsonl", '{"text": "x", "choices": ["a", "b"], "label": 1}\n' + line)
    with pytest.raises(CtxError, match=rf"(?s){message}.*a\.jsonl:2"):
        make_task(task).read(file, "train")


@pytest.mark.parametrize("task", ["sequence-classification", "regression", "multiple-choice"])
def test_test_sets_without_labels_raise(tmp_path, task):
    """GLUE test sets have the label -1 in all rows; -1 among other labels is a valid label."""
    line = '{"text": "x", "choices": ["a", "b"], "label": %s}\n'
    file = write_file(tmp_path / "a.jsonl", (line % -1) * 2)
    with pytest.raises(CtxError, match=r"(?s)All 2 labels in 'label' are -1.*a\.jsonl:1.*hf-ctxmodels predict"):
        make_task(task).read(file, "validation")
    if task != "multiple-choice":
        assert len(make_task(task).read(write_file(tmp_path / "b.jsonl", line % -1 + line % 1), "train")) == 2


@pytest.mark.parametrize("task", ["sequence-classification", "regression", "multiple-choice"])
def test_json_lines_with_a_label_in_some_lines(tmp_path, task):
    lines = [{"text": "x", "choices": ["a", "b"]}, {"text": "y", "choices": ["a", "b"], "label": 1}]
    for number, records in enumerate((lines, lines[::-1])):
        file = write_file(tmp_path / f"{number}.jsonl", "\n".join(map(json.dumps, records)))
        assert make_task(task).has_labels(file)
        with pytest.raises(CtxError, match=rf"(?s)No column 'label'.*jsonl:{number + 1}"):
            make_task(task).read(file, "validation")
    assert not make_task(task).has_labels(write_file(tmp_path / "a.jsonl", json.dumps(lines[0])))


def test_unknown_and_single_labels_raise(tmp_path, tokenizer):
    task = make_task("sequence-classification")
    train = task.read(write_file(tmp_path / "a.tsv", "text\tlabel\nx\tpos\ny\tneg\n"), "train")
    validation = task.read(write_file(tmp_path / "b.tsv", "text\tlabel\nx\tneutral\n"), "validation")
    task.configure(CtxBertConfig(), train, validation)
    with pytest.raises(CtxError, match=r"(?s)label 'neutral' does not occur.*'neg', 'pos'.*b\.tsv:2"):
        task.encode(validation, tokenizer)
    with pytest.raises(CtxError, match="two labels or more"):
        make_task("sequence-classification").configure(CtxBertConfig(), train[:1], [])


def test_regression_baseline_is_the_mean(tmp_path, tokenizer):
    task = make_task("regression", text_columns="1", label_column="2")
    examples = task.read(write_file(tmp_path / "a.csv", "The cat,1\nA dog,2.5\n"), "train")
    config = CtxBertConfig()
    task.configure(config, examples, [])
    assert (config.num_labels, config.problem_type) == (1, "regression")
    batch = task.collator(tokenizer)(task.encode(examples, tokenizer).features)
    assert batch["labels"].tolist() == [1.0, 2.5]
    assert batch["labels"].is_floating_point()
    assert task.baseline(examples, examples) == [1.75, 1.75]
    scores = task.score(examples, task.baseline(examples, examples))
    assert scores == {"pearsonr": 0.0, "spearmanr": 0.0, "mse": 0.75**2}


def test_demo_splits_are_balanced_and_disjoint():
    task = make_task("sequence-classification")
    train, validation = task.read("demo", "train"), task.read("demo", "validation")
    assert [len(train), len(validation)] == [160, 40]
    for examples in (train, validation):
        assert sum(example.label == "pos" for example in examples) == len(examples) / 2
    assert not {example.location for example in train} & {example.location for example in validation}


@pytest.mark.parametrize("layout", ["columns", "list"])
def test_choices_are_paired_with_context(tmp_path, tokenizer, layout):
    lines = ["sent1,sent2,a,b,label", "The cat,A dog,saw,carried,1", "Nobody,Her brother,painted,forgot,0"]
    file = write_file(tmp_path / "a.csv", "\n".join(lines))
    arguments = {"text_columns": "sent1,sent2", "choice_columns": "a,b"}
    if layout == "list":
        rows = [line.split(",") for line in lines[1:]]
        records = [{"sent1": r[0], "sent2": r[1], "endings": r[2:4], "label": int(r[4])} for r in rows]
        file = write_file(tmp_path / "a.jsonl", "\n".join(map(json.dumps, records)))
        arguments["choice_columns"] = "endings"
    task = make_task("multiple-choice", **arguments)
    examples = task.read(file, "train")
    encoded = task.encode(examples, tokenizer)
    assert [tokenizer.decode(ids) for ids in encoded.features[0]["input_ids"]] == [
        "[CLS] the cat [SEP] a dog saw [SEP]",
        "[CLS] the cat [SEP] a dog carried [SEP]",
    ]
    batch = task.collator(tokenizer)([feature | {"epoch": 1, "example_index": 0} for feature in encoded.features])
    assert batch["input_ids"].shape[:2] == (2, 2)
    assert batch["labels"].tolist() == [1, 0]
    outputs = [{"logits": np.array([0.0, 1.0])}] * 2
    assert task.score(examples, task.decode(examples, encoded, outputs)) == {"accuracy": 0.5}


RANKED = ["query,candidate,label", "the cat,a dog saw,0", "the cat,nobody,1", "the cat,a cat,1", "her dog,a cat,1"]
RANKED += ["her dog,her cat,0", "her dog,no cat,0", "her dog,my cat,0"]


def test_ranking_examples_and_scores(tmp_path, tokenizer):
    """Each relevant candidate is encoded with all irrelevant ones; scores have the order of the candidates."""
    task = make_task("ranking")
    examples = task.read(write_file(tmp_path / "a.csv", "\n".join(RANKED)), "train")
    assert [example.relevant for example in examples] == [(False, True, True), (True, False, False, False)]
    encoded = task.encode(examples, tokenizer)
    texts = [[tokenizer.decode(ids) for ids in feature["input_ids"]] for feature in encoded.features]
    assert texts[0] == ["[CLS] the cat [SEP] nobody [SEP]", "[CLS] the cat [SEP] a dog saw [SEP]"]
    assert texts[1] == ["[CLS] the cat [SEP] a cat [SEP]", "[CLS] the cat [SEP] a dog saw [SEP]"]
    assert texts[2] == [f"[CLS] her dog [SEP] {word} cat [SEP]" for word in ("a", "her", "no", "my")]
    batch = task.collator(tokenizer)([feature | {"epoch": 1, "example_index": 0} for feature in encoded.features])
    assert batch["labels"].tolist() == [0, 0, 0]
    assert batch["choice_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
    assert torch.equal(batch["input_ids"][:2, 2], batch["input_ids"][:2, 0])
    outputs = [
        {"logits": np.array(row)} for row in ([3.0, 2.0, -9.0, -9.0], [1.0, 2.0, -9.0, -9.0], [0.0, 1.0, 0.0, -1.0])
    ]
    scores = task.decode(examples, encoded, outputs)
    assert scores == [[2.0, 3.0, 1.0], [0.0, 1.0, 0.0, -1.0]]
    # the best relevant candidate ranks first for query 1 and third for query 2: one is above, one is equal
    assert task.score(examples, scores) == {"mrr": pytest.approx((1 + 1 / 3) / 2), "accuracy_at_1": 0.5}
    assert task.baseline(examples, examples) == [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.0]]
    assert task.record(examples[0], scores[0])["relevant"] == (False, True, True)
    for lines, message in (
        ([*RANKED, "the cat,no,0"], r"(?s)not consecutive: 'the cat'.*csv:9, first at .*csv:2"),
        (["query,candidate,label", "the cat,a,2"], r"(?s)label '2' is neither 1.*csv:2"),
        (["query,candidate,label", "the cat,a,1", "the cat,b,1"], r"(?s)All of the 2 candidates .*csv:2"),
        (["query,candidate,label", "the cat,a,0"], r"(?s)None of the 1 candidates"),
    ):
        with pytest.raises(CtxError, match=message):
            task.read(write_file(tmp_path / "b.csv", "\n".join(lines)), "train")
    with pytest.raises(CtxError, match="2 columns, got 1"):
        make_task("ranking", text_columns="query").read(str(tmp_path / "a.csv"), "train")


TASKS_OF_FLAG = {
    "choice_columns": {"multiple-choice"},
    "doc_stride": {"question-answering"},
    "span_beam_search": {"question-answering"},
    "null_threshold": {"question-answering"},
    "max_answer_length": {"question-answering"},
    "head_column": {"semantic-role-labeling"},
    "both_orders": {"sequence-classification", "multi-label-classification", "regression"},
    "label_delimiter": {"multi-label-classification"},
    "text_columns": set(TASKS) - {"question-answering", "coreference", "dependency-parsing"},
    "label_column": set(TASKS) - {"question-answering", "coreference", "dependency-parsing"},
    "max_length": set(TASKS),
}


@pytest.mark.parametrize("name", ["max_answer_length", "max_target_length", "num_beams"])
def test_number_out_of_range(name):
    with pytest.raises(CtxError, match=f"{name}=0 is out of range"):
        TaskArguments(**{name: 0})


def test_unused_flags_raise():
    """Flags that are not in TASKS_OF_FLAG belong to seq2seq; default values are accepted."""
    valid_values = {"metrics": "rouge", "target_options": ["key=value"], "max_length": 7}
    for flag in fields(TaskArguments):
        value = valid_values.get(flag.name, 3)
        for name in TASKS:
            task = make_task(name, **{flag.name: value})
            if name in TASKS_OF_FLAG.get(flag.name, {"seq2seq"}):
                task.check_unused_arguments()
            else:
                with pytest.raises(CtxError, match=f"{name} does not use it") as error:
                    task.check_unused_arguments()
                assert error.value.location == f"--{flag.name}"
    for name in TASKS:
        make_task(name).check_unused_arguments()
