"""Records of Parquet files and datasets: labels by name, nested columns, splits."""

import json
import shutil

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, List, Value

from hf_ctxmodels import CtxBertConfig
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data import load_documents
from hf_ctxmodels.data.files import describe_content, split_dataset_options
from hf_ctxmodels.data.hub_datasets import DatasetSource, is_dataset, source_name, with_default_split
from hf_ctxmodels.data.record_files import class_names, read_records
from hf_ctxmodels.data.table_files import has_columns, has_labels, read_table
from hf_ctxmodels.downstream.tasks import TASKS, TaskArguments
from hf_ctxmodels.downstream.text2text import TextTask

LABELS = ClassLabel(names=["not_equivalent", "equivalent"])
PAIRS = Dataset.from_dict(
    {"sentence1": ["A b.", "C d."], "sentence2": ["A b!", "E f."], "label": [1, 0]},
    Features({"sentence1": Value("string"), "sentence2": Value("string"), "label": LABELS}),
)
UNLABELED = PAIRS.remove_columns("label").add_column("label", [-1, -1]).cast_column("label", LABELS)
ENTITIES = Dataset.from_dict(
    {"tokens": [["Anna", "saw", "Bonn"], ["Go"]], "ner_tags": [[1, 0, 3], [0]]},
    Features(
        {"tokens": List(Value("string")), "ner_tags": List(ClassLabel(names=["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]))}
    ),
)
QUESTIONS = Dataset.from_list(
    [
        {
            "id": "q1",
            "question": "Who saw Bonn?",
            "context": "Anna saw Bonn.",
            "answers": {"text": ["Anna"], "answer_start": [0]},
        },
        {"id": "q2", "question": "Why?", "context": "Anna saw Bonn.", "answers": {"text": [], "answer_start": []}},
    ]
)
CHOICES = Dataset.from_dict(
    {"premise": ["It rained."], "choice1": ["It was wet."], "choice2": ["It was dry."], "label": [1]},
    Features(
        {name: Value("string") for name in ("premise", "choice1", "choice2")}
        | {"label": ClassLabel(names=["choice1", "choice2"])}
    ),
)


def save(dataset, folder, layout):
    """The source of a dataset in a layout: a Parquet file, a directory of Parquet files, or of `save_to_disk`."""
    if layout == "file":
        dataset.to_parquet(folder / "data.parquet")
        return str(folder / "data.parquet")
    if layout == "directory":
        dataset.to_parquet(folder / "train-00000-of-00001.parquet")
    else:
        DatasetDict({"train": dataset}).save_to_disk(folder)
    return str(folder)


def read(task, source, **arguments):
    return TASKS[task](TaskArguments(**arguments)).read(source, "train")


@pytest.mark.parametrize("layout", ["file", "directory", "saved"])
def test_tasks_read_datasets(tmp_path, layout):
    """Class numbers are replaced by names, except where a number is the index of a choice."""
    folders = [tmp_path / name for name in "abcd"]
    for folder in folders:
        folder.mkdir()
    pairs = read("sequence-classification", save(PAIRS, folders[0], layout), text_columns="sentence1,sentence2")
    assert [(example.texts, example.label) for example in pairs] == [
        (("A b.", "A b!"), "equivalent"),
        (("C d.", "E f."), "not_equivalent"),
    ]
    task, config = TASKS["sequence-classification"](TaskArguments(text_columns="sentence1,sentence2")), CtxBertConfig()
    task.configure(config, task.read(str(folders[0] / "data.parquet" if layout == "file" else folders[0]), "train"), [])
    assert config.id2label == {0: "not_equivalent", 1: "equivalent"}, "not in the order of the classes"
    sentences = read("token-classification", save(ENTITIES, folders[1], layout), label_column="ner_tags")
    assert [(sentence.words, sentence.tags) for sentence in sentences] == [
        (["Anna", "saw", "Bonn"], ["B-PER", "O", "B-LOC"]),
        (["Go"], ["O"]),
    ]
    questions = read("question-answering", save(QUESTIONS, folders[2], layout))
    assert [(question.id, question.answers) for question in questions] == [("q1", ((0, "Anna"),)), ("q2", ())]
    columns = {"text_columns": "premise", "choice_columns": "choice1,choice2"}
    (choice,) = read("multiple-choice", save(CHOICES, folders[3], layout), **columns)
    assert (choice.choices, choice.label) == (("It was wet.", "It was dry."), 1)


def test_tags_are_in_the_order_of_the_classes(tmp_path):
    """The ids of the model are the class numbers of the dataset; with a tag that is no class (`B-LOC` after conversion
    from IOB1), the tags are sorted."""
    for name, names, expected in (
        ("bio", ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"], ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]),
        ("pos", ["VERB", "NOUN", "ADP", "X"], ["VERB", "NOUN", "ADP", "X"]),
        ("iob1", ["I-PER", "I-LOC", "O", "B-PER"], ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]),
    ):
        features = Features({"tokens": List(Value("string")), "tags": List(ClassLabel(names=names))})
        path = str(tmp_path / f"{name}.parquet")
        Dataset.from_dict({"tokens": [["Bonn", "saw", "it"]], "tags": [[1, 0, 2]]}, features).to_parquet(path)
        task, config = TASKS["token-classification"](TaskArguments()), CtxBertConfig()
        task.configure(config, task.read_file(path), [])
        assert [*config.id2label.values()] == expected, name


def test_test_sets_without_labels(tmp_path):
    source = save(UNLABELED, tmp_path, "file")
    assert not has_labels(source, "label")
    assert has_columns(source, ["sentence1", "label"])
    assert not has_columns(source, ["sentence"])
    with pytest.raises(CtxError, match="labels in 'label' are -1"):
        read("sequence-classification", source, text_columns="sentence1,sentence2")


def test_nested_columns(tmp_path):
    """A value within an object is a column; a column of this name has precedence."""
    translation = {"translation": {"en": "A house.", "de": "Ein Haus."}}
    Dataset.from_list([translation]).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text(json.dumps(translation | {"translation.de": "Haus"}))
    for name, target in (("a.parquet", "Ein Haus."), ("a.jsonl", "Haus")):
        arguments = {"text_columns": "translation.en", "label_column": "translation.de"}
        (example,) = read("seq2seq", str(tmp_path / name), **arguments)
        assert (example.source, example.target) == ("A house.", target)
    with pytest.raises(CtxError, match=r"No column 'translation\.fr'.*'translation\.de'"):
        read_table(tmp_path / "a.parquet", ["translation.fr"])


def test_classes_in_nested_columns(tmp_path):
    features = Features(
        {"meta": {"body": {"text": Value("string")}, "mood": LABELS, "tags": List(LABELS), "open": Value("int64")}}
    )
    rows = [
        {"body": {"text": "x"}, "mood": 1, "tags": [0, 1], "open": 1},
        {"body": None, "mood": -1, "tags": [], "open": 0},
    ]
    path = str(tmp_path / "a.parquet")
    Dataset.from_dict({"meta": rows}, features).to_parquet(path)
    columns = ["meta.body.text", "meta.mood", "meta.tags", "meta.open"]
    assert [*read_table(path, columns[1:])[0].values.values()] == ["equivalent", ["not_equivalent", "equivalent"], 1]
    assert [*read_table(path, columns[1:])[1].values.values()] == [-1, [], 0]
    assert class_names(path, "meta.mood") == class_names(path, "meta.tags") == LABELS.names
    assert class_names(path, "meta.open") == class_names(path, "meta.none") == []
    Dataset.from_dict({"meta": rows[:1]}, features).to_parquet(path)
    assert read_table(path, columns)[0].values["meta.body.text"] == "x"


def test_only_selected_columns_are_decoded(tmp_path):
    """Other columns, such as images, may be large or need another package; an error lists all columns."""
    features = Features({"text": Value("string"), "image": Image(), "meta": {"mood": LABELS}})
    rows = {"text": ["x"], "image": [{"bytes": b"no image", "path": None}], "meta": [{"mood": 1}]}
    dataset = Dataset.from_dict(rows, features)
    for layout in ("directory", "saved", "file"):
        (tmp_path / layout).mkdir()
        source = save(dataset, tmp_path / layout, layout)
        assert has_columns(source, ["text", "meta.mood"])
        assert has_labels(source, "meta.mood")
        (example,) = read("sequence-classification", source, label_column="meta.mood")
        assert example.label == "equivalent"
        if layout == "file":
            with pytest.raises(CtxError, match=r"No column 'meta\.none'.*'meta\.mood', 'text', 'image', 'meta'"):
                read_table(source, ["meta.none"])


def test_examples_without_a_class_are_skipped(tmp_path, capsys):
    """As in SNLI, where -1 means that the annotators did not agree; -1 in a column without classes is a label."""
    labels = {"sentence1": ["x"] * 4, "sentence2": ["y"] * 4, "label": [1, -1, 0, -1]}
    for classes, expected in ((True, ["equivalent", "not_equivalent"]), (False, ["1", "-1", "0", "-1"])):
        path = str(tmp_path / f"{classes}.parquet")
        Dataset.from_dict(labels, PAIRS.features if classes else None).to_parquet(path)
        examples = read("sequence-classification", path, text_columns="sentence1,sentence2")
        assert [example.label for example in examples] == expected
        assert ("2 of 4 examples have no label (-1); they are skipped" in capsys.readouterr().err) == classes


def test_parquet_types_that_datasets_lacks(tmp_path):
    """Columns of other types, such as maps, do not prevent reading a file."""
    path = str(tmp_path / "a.parquet")
    columns = {
        "text": pa.array(["x", "y"]).dictionary_encode(),
        "counts": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int64())),
        "meta": pa.array([{"mood": "good"}, None]),
    }
    pq.write_table(pa.table(columns), path)
    assert [record["text"] for record, _ in read_records(path)] == ["x", "y"]
    assert [row.values for row in read_table(path, ["text", "counts"])] == [
        {"text": "x", "counts": [("a", 1)]},
        {"text": "y", "counts": None},
    ]
    assert next(read_records(path, columns=["meta.mood"]))[0] == {"meta": {"mood": "good"}, "meta.mood": "good"}
    assert class_names(path, "counts") == class_names(path, "text") == []


@pytest.mark.parametrize("format_type", ["torch", "numpy", "pandas", "arrow", "columns"])
def test_format_of_a_saved_dataset_is_ignored(tmp_path, format_type):
    """`save_to_disk` saves the format in which rows are returned, for example as tensors, and without some columns."""
    dataset = Dataset.from_dict(
        {"text": ["x y", "z"], "label": [1, 0]}, Features({"text": Value("string"), "label": LABELS})
    )
    if format_type == "columns":
        dataset = dataset.with_format("torch", columns=["label"])
    else:
        dataset = dataset.with_format(format_type)
    dataset.save_to_disk(tmp_path)
    rows = [row.values for row in read_table(tmp_path, ["text", "label"])]
    assert rows == [{"text": "x y", "label": "equivalent"}, {"text": "z", "label": "not_equivalent"}]
    assert {type(value) for row in rows for value in row.values()} == {str}
    assert [*load_documents(str(tmp_path))] == [["x y"], ["z"]]


def test_missing_labels_as_floating_point_numbers(tmp_path):
    """pandas stores integers as floating-point numbers, and writes missing values as NaN."""
    path = tmp_path / "a.jsonl"
    for missing in ("NaN", "-1.0", "null", '" -1 "', '""', "[]"):
        path.write_text(f'{{"text": "x", "label": {missing}}}\n')
        assert not has_labels(path, "label"), missing
    path.write_text('{"text": "x", "label": 1.0}\n{"text": "y", "label": NaN}\n')
    assert has_labels(path, "label")
    with pytest.raises(CtxError, match=r"nan is not a label(?s:.*)a\.jsonl:2"):
        read("sequence-classification", str(path))


def test_source_with_options(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("datasets.load_dataset", lambda *arguments, **_: calls.append(arguments) or PAIRS)
    monkeypatch.setattr("hf_ctxmodels.data.hub_datasets.require_existing_path", lambda *_: None)
    source = "nyu-mll/glue:config=mrpc,split=train[:10%]"
    assert DatasetSource.parse(source) == DatasetSource("nyu-mll/glue", "mrpc", "train[:10%]")
    assert str(DatasetSource.parse(source)) == source
    assert len([*read_records(source)]) == 2
    assert calls == [("nyu-mll/glue", "mrpc")]
    assert (source_name(source), source_name("demo"), source_name("a/b.csv")) == ("nyu-mll/glue", "demo", "b.csv")
    assert with_default_split("nyu-mll/glue:config=mrpc", "test") == "nyu-mll/glue:config=mrpc,split=test"
    for unchanged in (source, "demo", "a.csv", "hf://datasets/a/b.parquet", f"{tmp_path}/none"):
        assert with_default_split(unchanged, "test") == unchanged
    with pytest.raises(CtxError, match="Unknown option 'name'"):
        split_dataset_options("nyu-mll/glue:split=train,name=mrpc")
    directory = f"{save(PAIRS, tmp_path, 'directory')}:split=train"
    assert is_dataset(directory)
    assert describe_content(directory).startswith(f"{tmp_path.name} (")
    assert describe_content(directory).endswith("):split=train")


@pytest.mark.parametrize("layout", ["directory", "saved"])
def test_dataset_is_loaded_once_until_it_changes(tmp_path, monkeypatch, layout):
    calls, folder = [], tmp_path / "data"
    for name in ("load_dataset", "load_from_disk"):
        load = getattr(datasets, name)
        monkeypatch.setattr(
            datasets, name, lambda *args, load=load, **kwargs: calls.append(args) or load(*args, **kwargs)
        )
    for number, rows in enumerate((PAIRS, PAIRS.select([0, 0, 0])), 1):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        source = save(rows, folder, layout)
        task = TASKS["sequence-classification"](TaskArguments(text_columns="sentence1,sentence2"))
        assert has_columns(source, ["sentence1", "label"])
        assert has_labels(source, "label")
        assert len(task.read_file(source)) == len(read_table(source, ["label"])) == len(rows)
        assert len(calls) == number
    assert len(read_table(f"{source}:split=train", ["label"])) == 3
    assert len(calls) == 2


def test_validation_split_of_a_dataset(tmp_path, capsys):
    DatasetDict({"train": PAIRS, "validation": PAIRS.select([0]), "test": UNLABELED}).save_to_disk(tmp_path)
    task = TASKS["sequence-classification"](TaskArguments(text_columns="sentence1,sentence2"))
    training, validation = task.read_splits([str(tmp_path), f"{tmp_path}:split=validation"], str(tmp_path))
    assert capsys.readouterr().err.count("warning") == 1
    assert (len(training), len(validation)) == (3, 1)


@pytest.mark.parametrize("split", [None, "train", "test"])
def test_saved_dataset_without_other_splits(tmp_path, split):
    """`Dataset.save_to_disk` writes one split, whose name is the one in which the dataset was loaded, if any."""
    dataset = Dataset(PAIRS.data, split=split)
    dataset.save_to_disk(tmp_path)
    task = TASKS["sequence-classification"](TaskArguments(text_columns="sentence1,sentence2"))
    for default in ("train", "validation", "test"):
        assert len(task.read(str(tmp_path), default)) == 2
        assert with_default_split(str(tmp_path), default) == f"{tmp_path}:split={split or 'train'}"
    assert len([*read_records(tmp_path)]) == len(DatasetSource.parse(str(tmp_path)).load()) == 2
    with pytest.raises(CtxError, match=f"no split 'other'(.|\n)*use one of: {split or 'train'}"):
        task.read(f"{tmp_path}:split=other", "train")
    DatasetDict({"train": PAIRS}).save_to_disk(tmp_path / "splits")
    with pytest.raises(CtxError, match="no split 'validation'"):
        task.read(str(tmp_path / "splits"), "validation")


def test_directory_of_text_tables_is_refused(tmp_path):
    """`datasets` interprets quotes in .tsv files."""
    (tmp_path / "train.tsv").write_text('text\tlabel\n"a\t1\n')
    with pytest.raises(CtxError, match=r"has tables in text files(.|\n)*pass .*train\.tsv"):
        read_table(tmp_path, ["text", "label"])


def test_damaged_parquet_file(tmp_path):
    path = save(PAIRS, tmp_path, "file")
    content = (tmp_path / "data.parquet").read_bytes()
    (tmp_path / "data.parquet").write_bytes(content[:-20])
    with pytest.raises(CtxError, match=r"Parquet file is damaged(.|\n)*data\.parquet"):
        read_table(path, ["label"])


@pytest.mark.parametrize("read_source", [load_documents, lambda source: read_table(source, ["label"])])
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("rows:splt=train", "Unknown option 'splt' of a dataset"),
        ("org/name:name=mrpc", "Unknown option 'name' of a dataset"),
        ("rows:config=x", "written by `save_to_disk` has no configurations"),
        ("rows:split=train[:1]", r"no split 'train\[:1\]'(.|\n)*use one of: train"),
        ("a.parquet:split=train", "A file has no configurations and splits"),
        ("./row", "No such file|no such directory"),
        ("~/row", "No such file|no such directory"),
    ],
)
def test_invalid_sources(tmp_path, monkeypatch, read_source, source, message):
    monkeypatch.chdir(tmp_path)
    PAIRS.save_to_disk("rows")
    save(PAIRS, tmp_path, "file")
    (tmp_path / "data.parquet").rename("a.parquet")
    with pytest.raises(CtxError, match=message):
        read_source(source)


def test_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save(PAIRS, tmp_path, "file")
    PAIRS.save_to_disk(tmp_path / "rows")
    for source in ("~/data.parquet", "~/rows", "~/rows:split=train", f"file://{tmp_path}/data.parquet"):
        assert [row.values["label"] for row in read_table(source, ["label"])] == ["equivalent", "not_equivalent"]


def test_names_of_hub_datasets():
    """A version number is no suffix of a file."""
    assert all(map(is_dataset, ("imdb", "org/name", "org/name-v1.0", "org/name.csv:split=test")))
    assert not any(
        map(is_dataset, ("demo", "org/name.csv", "org/eng.testa", "./name", "org/name/file", "https://x.org/name"))
    )


def test_questions_without_answers_have_no_labels(tmp_path):
    """As in test sets, where the lists of answers are empty."""
    task, unanswerable = TASKS["question-answering"](TaskArguments()), QUESTIONS.select([1])
    for name, dataset in (("questions", QUESTIONS), ("test", unanswerable), ("rest", QUESTIONS.remove_columns("id"))):
        dataset.to_parquet(tmp_path / f"{name}.parquet")
    assert task.has_labels(str(tmp_path / "questions.parquet"))
    assert not task.has_labels(str(tmp_path / "test.parquet"))
    assert not task.has_labels(str(tmp_path / "rest.parquet"))
    text_task = TextTask("squad", "{question}", "{answers}", format="squad")
    assert text_task.has_labels(str(tmp_path / "questions.parquet"))
    assert not text_task.has_labels(str(tmp_path / "test.parquet"))
    QUESTIONS.remove_columns("answers").to_parquet(tmp_path / "questions.parquet")
    assert [example.input for example in text_task.read(str(tmp_path / "questions.parquet"), labeled=False)] == [
        "Who saw Bonn?",
        "Why?",
    ]


def test_parquet_columns_of_one_name_are_an_error(tmp_path) -> None:
    file = str(tmp_path / "data.parquet")
    pq.write_table(pa.table([["first"], ["second"], ["third"]], names=["text", "text", "label"]), file)
    for read in (lambda: [*read_records(file)], lambda: [*load_documents(file)], lambda: class_names(file, "label")):
        with pytest.raises(CtxError, match="2 columns are named 'text'"):
            read()
