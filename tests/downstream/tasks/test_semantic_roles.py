"""Semantic role labeling: files, predicate marker, constrained decoding, and CoNLL-2005 scores."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from commands import command_output, save, tiny_pair
from hypothesis import given
from hypothesis import strategies as st
from task_files import make_task, write_file

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.table_files import iob1_to_bio
from hf_ctxmodels.downstream.tasks.metrics import argument_scores, proposition_arguments
from hf_ctxmodels.models.bert.configuration_bert import CtxBertConfig
from hf_ctxmodels.models.bert.tokenization_bert import CtxBertTokenizer

TASK = "semantic-role-labeling"
COLUMNS = """# sent_id = 1
1\tShe\tPRP\t2\tnsubj\t_\t(ARG0*)\t*
2\tgave\tVBD\t0\troot\tgive.01\t(V*)\t*
3\tup\tRP\t2\tprt\t_\t(C-V*)\t*
4\tthe\tDT\t5\tdet\t_\t(ARG1*\t*
5\tplan\tNN\t2\tobj\t_\t*)\t(V*)
6\tto\tTO\t7\tmark\t-\t*\t(ARG1*
7\tgo\tVB\t5\tacl\t_\t*\t*)

1\tYes\tUH\t0\troot\t_
"""


def test_columns_yield_one_example_per_predicate(tmp_path: Path) -> None:
    file = write_file(tmp_path / "a.conll.gz", COLUMNS.replace("plan\tNN\t2\tobj\t_", "plan\tNN\t2\tobj\tplan.01"))
    first, second = make_task(TASK).read_file(file)
    assert first.words == second.words == ["She", "gave", "up", "the", "plan", "to", "go"]
    assert (first.predicate, first.roleset, first.location[-2:]) == (1, "give.01", ":3")
    assert first.tags == ["B-ARG0", "B-V", "B-C-V", "B-ARG1", "I-ARG1", "O", "O"]
    assert (second.predicate, second.tags) == (4, ["O", "O", "O", "O", "B-V", "B-ARG1", "I-ARG1"])
    spaces = "Ann - (A0*A0) (A0*\nran run (V*V) *\nand - * *\nfell fall * (V*)\n".replace("(A0*\n", "(A0*)\n")
    columns = {"text_columns": "1", "label_column": "2"}
    ran, fell = make_task(TASK, **columns).read_file(write_file(tmp_path / "b.conll", spaces))
    assert (ran.tags, fell.tags) == (["B-A0", "B-V", "O", "O"], ["B-A0", "O", "O", "B-V"])
    unlabeled = make_task(TASK, **columns).read_unlabeled(write_file(tmp_path / "c.conll", "Ann -\nran run\n"))
    assert [(example.predicate, example.tags) for example in unlabeled] == [(1, ["O", "O"])]


def test_head_words(tmp_path: Path) -> None:
    """Spans are reduced to words whose heads are outside the span; Universal Propositions annotate head words."""
    text = COLUMNS.replace("plan\tNN\t2\tobj\t_", "plan\tNN\t2\tobj\tplan.01")
    first, second = make_task(TASK, head_column=4).read_file(write_file(tmp_path / "a.conll", text))
    assert first.tags == ["B-ARG0", "B-V", "O", "O", "B-ARG1", "O", "O"]
    assert second.tags == ["O", "O", "O", "O", "B-V", "O", "B-ARG1"]
    with pytest.raises(CtxError, match=r"(?s)as the head of each word.*a\.conll:3.*--head_column"):
        make_task(TASK, head_column=3).read_file(write_file(tmp_path / "a.conll", text))
    rows = [
        "# sent_id = 1",
        "1\tElle\til\tPRON\t_\t_\t2\tnsubj\t_\t_\tA0",
        "2\tparle\tparler\tVERB\t_\t_\t0\troot\tY\tspeak.01\t_",
        "3-4\tdu\t_\t_\t_\t_\t_\t_\t_\t_",
        "3\tde\tde\tADP\t_\t_\t5\tcase\t_\t_\tAM-TMP",
        "4\tle\tle\tDET\t_\t_\t5\tdet\t_\t_\tR-A1",
        "5\tplan\tplan\tNOUN\t_\t_\t2\tobl\t_\t_\tA1",
    ]
    (example,) = make_task(TASK, head_column=4).read_file(write_file(tmp_path / "fr.conllu", "\n".join(rows) + "\n"))
    assert example.words == ["Elle", "parle", "de", "le", "plan"]
    assert example.tags == ["B-ARG0", "B-V", "B-ARGM-TMP", "B-R-ARG1", "B-ARG1"]
    assert (example.predicate, example.roleset) == (1, "speak.01")


def test_unknown_roles_count_as_errors(tmp_path: Path) -> None:
    task = make_task(TASK)
    lines = [f'{{"tokens": ["a", "b"], "predicate": 0, "tags": ["B-V", "{role}"]}}' for role in ("B-A0", "B-A9")]
    train, test = ([*task.read_file(write_file(tmp_path / f"{n}.jsonl", line))] for n, line in enumerate(lines))
    task.configure(CtxBertConfig(type_vocab_size=2), train, [])
    tokenizer = CtxBertTokenizer.train(["a b"], vocab_size=20)
    labels = task.encode(test, tokenizer).features[0]["labels"]
    assert [label for label in labels if label >= 0] == [task.labels.index("B-V")]
    assert task.score(test, [["B-V", "O"]])["f1"] == 0


@pytest.mark.parametrize("language", ["de", "fr", "es"])
def test_universal_propositions(shared_data: Path, language: str) -> None:
    """More than 99% of the tags occur in English PropBank reduced to head words."""
    folder = shared_data / "srl"
    english = make_task(TASK, head_column=4).read_file(str(folder / "ewt_propbank" / "en_ewt-propbank-dev.conll.gz"))
    foreign = make_task(TASK).read_file(str(folder / "up" / f"{language}-up-dev.conllu.gz"))
    roles = [Counter(tag for example in data for tag in example.tags if tag != "O") for data in (english, foreign)]
    assert not any(tag.startswith("I-") for counts in roles for tag in counts)
    assert sum(roles[1][tag] for tag in roles[0]) > 0.99 * roles[1].total()
    assert roles[1]["B-ARG1"] > roles[1]["B-ARG2"] > 0


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.conll", "a - *\nb run (V*)\nc - \n", r"(?s)2 column\(s\), expected 3.*a\.conll:3"),
        ("a.conll", "a - *\nb run (V*\n", r"(?s)V is not closed.*a\.conll:2"),
        ("a.conll", "a - (A0*\nb run (V*)\nc - *)\n", r"(?s)'\(V\*\)' does not open or close.*a\.conll:2"),
        ("a.conll", "a - \nb - \n", "No predicates"),
        ("a.jsonl", '{"1": ["a", "b"], "predicate": 2, "2": ["O", "B-V"]}', r"(?s)the index of a word.*a\.jsonl:1"),
        ("a.jsonl", '{"1": ["a", null], "predicate": 0, "2": ["B-V", "O"]}', r"(?s)Expected words.*a\.jsonl:1"),
        ("a.jsonl", '{"1": ["a", "b"], "predicate": 1, "2": ["I-A0", "B-V"]}', r"(?s)not BIO: I-A0 B-V.*a\.jsonl:1"),
    ],
)
def test_invalid_file_error_and_location(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(CtxError, match=message):
        make_task(TASK, text_columns="1", label_column="2").read_file(write_file(tmp_path / name, text))


def test_column_names_raise(tmp_path: Path) -> None:
    file, task = write_file(tmp_path / "a.conll", COLUMNS), make_task(TASK, label_column="roleset")
    for read in (task.read_file, task.read_unlabeled, task.has_labels):
        with pytest.raises(CtxError, match=r"(?s)numbers, not names; got '2' and 'roleset'.*a\.conll"):
            read(file)


def naive_arguments(tags: list[str]) -> set[tuple[str, str]]:
    """Arguments of BIO tags: role and word numbers, with `|` between spans."""
    words: dict[int, tuple[str, str]] = {}  # number of the argument -> role, words
    open_argument: dict[str, int] = {}  # role -> number of its latest argument
    current = -1
    for index, tag in enumerate(tags):
        label = tag[2:]
        if tag[0] == "B":
            role = label[2:] if label[:2] == "C-" else label
            if label[:2] == "C-" and role in open_argument:
                current = open_argument[role]
                words[current] = role, words[current][1] + "|"
            else:
                current = open_argument[role] = len(words)
                words[current] = role, ""
        if tag != "O":
            words[current] = words[current][0], words[current][1] + f" {index}"
    return {argument for argument in words.values() if argument[0] != "V"}


_ROLES = st.sampled_from(["O", "B-V", "I-V", "B-A0", "I-A0", "B-C-A0", "I-C-A0", "B-R-A0", "B-C-V", "B-A1", "B-C-A1"])


@given(st.lists(st.tuples(_ROLES, _ROLES), min_size=1, max_size=14))
def test_scores_match_naive_arguments(pairs: list[tuple[str, str]]) -> None:
    predicted, expected = (iob1_to_bio(tags) for tags in zip(*pairs, strict=True))
    sets = naive_arguments(predicted), naive_arguments(expected)
    correct = len(sets[0] & sets[1])
    scores = argument_scores([predicted], [expected])
    assert scores["precision"] == (correct / len(sets[0]) if sets[0] else 0)
    assert scores["recall"] == (correct / len(sets[1]) if sets[1] else 0)
    assert scores["f1"] == (2 * correct / (len(sets[0]) + len(sets[1])) if sets[0] or sets[1] else 0)


def test_continued_arguments_are_scored_as_a_whole() -> None:
    tags = ["B-A0", "B-V", "B-C-A0", "B-R-A0", "B-C-A1"]
    assert proposition_arguments(tags) == {("A0", ((0, 1), (2, 3))), ("R-A0", ((3, 4),)), ("A1", ((4, 5),))}
    scores = argument_scores([["B-A0", "B-V", "O", "B-R-A0", "B-A1"]], [tags])
    assert scores == {"f1": 2 / 3, "precision": 2 / 3, "recall": 2 / 3}


@pytest.mark.parametrize("type_vocab_size", [2, 0])
def test_predicate_marker_and_valid_predictions(tmp_path: Path, type_vocab_size: int) -> None:
    words = ["sailor", "mended", "unrelatedness", "\u200b", "boat", *["neighbor", "garden"] * 4]
    tags = ["B-A0", "B-V", "B-A1", "I-A1", "I-A1", *["B-C-A1", "O"] * 4]
    line = json.dumps({"tokens": words, "predicate": 1, "tags": tags})
    task = make_task(TASK, max_length=16)
    examples = task.read_file(write_file(tmp_path / "a.jsonl", line))
    config = CtxBertConfig(type_vocab_size=type_vocab_size)
    task.configure(config, examples, [])
    tokenizer = CtxBertTokenizer.train([" ".join(words[:5]) + " * neighbor garden"], vocab_size=80)
    encoded = task.encode(examples, tokenizer)
    assert len(encoded.features) > 1
    tokens = [tokenizer.convert_ids_to_tokens(feature["input_ids"]) for feature in encoded.features]
    first = encoded.features[0]
    if type_vocab_size:
        marked = [token for token, segment in zip(tokens[0], first["token_type_ids"], strict=True) if segment]
        assert "".join(marked).replace("##", "") == "mended"
        assert not any(any(feature["token_type_ids"]) for feature in encoded.features[1:])
    else:
        marker = tokens[0].index("*")
        assert tokens[0][marker + 1][0] == "m"
        assert first["labels"][marker] == -100
        assert [row.count("*") for row in tokens] == [1, *[0] * (len(tokens) - 1)]
    targets = [label for feature in encoded.features for label in feature["labels"] if label != -100]
    assert targets == [task.labels.index(tag) for word, tag in zip(words, tags, strict=True) if word != "\u200b"]
    oracle = [{"logits": np.eye(len(task.labels))[np.maximum(feature["labels"], 0)]} for feature in encoded.features]
    (prediction,) = task.decode(examples, encoded, oracle)
    assert task.score(examples, [prediction])["f1"] == 1.0
    rng = np.random.default_rng(0)
    outputs = [{"logits": rng.normal(size=output["logits"].shape)} for output in oracle]
    (prediction,) = task.decode(examples, encoded, outputs)
    assert iob1_to_bio(prediction) == prediction
    windows = zip(outputs, encoded.origins, strict=True)
    first_words = [
        task.labels[output["logits"][position].argmax()] for output, (_, words) in windows for position in words
    ]
    assert iob1_to_bio(first_words) != first_words, "the best label of each word already gives valid tags"


def test_tokenizer_without_marker_raises(tmp_path: Path, tokenizer: CtxBertTokenizer) -> None:
    task = make_task(TASK)
    examples = task.read_file(write_file(tmp_path / "a.jsonl", '{"tokens": ["a"], "predicate": 0, "tags": ["B-V"]}'))
    task.configure(CtxBertConfig(type_vocab_size=0), examples, [])
    with pytest.raises(CtxError, match="does not know the mark"):
        task.encode(examples, tokenizer)


NOUNS, VERBS = ["men", "boys", "eels", "dogs", "cats"], ["see", "like", "hear"]


@pytest.mark.parametrize("setup", ["bert", pytest.param("xlnet", marks=pytest.mark.slow), "features"])
def test_finetune_learns_arguments_of_marked_predicate(tmp_path: Path, setup: str) -> None:
    """Two predicates per sentence: the arguments depend on the marked one."""
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(50):
        a, b, c, d = rng.choice(NOUNS, 4)
        v, w = rng.choice(VERBS, 2)
        words = [a, v, b, "and", c, w, d]
        for start in (0, 4):
            tags = ["O"] * 7
            tags[start : start + 3] = ["B-A0", "B-V", "B-A1"]
            lines.append(json.dumps({"tokens": words, "predicate": start + 1, "tags": tags}))
    files = [write_file(tmp_path / f"{name}.jsonl", "\n".join(rows) + "\n") for name, rows in
             (("train", lines[:80]), ("dev", lines[80:]))]  # fmt: skip
    text = " ".join([*NOUNS, *VERBS, "and", "*", "."] * 3)
    family = "bert" if setup == "features" else setup
    save(tmp_path / "model", *tiny_pair(family, "AutoModel", [text], vocab_size=120))
    start = ("--model", tmp_path / "model", "--learning_rate", 5e-3)
    if setup == "features":
        options = ('network_options={"hidden_size": 16, "dropout": 0}', "feature_dropout=0")
        start = ("--features", f"bert={tmp_path / 'model'}", "--learning_rate", 0.03, "--config_options", *options)
    output = command_output(
        f"finetune {TASK}",
        *(*start, "--train_file", files[0], "--validation_file", files[1]),
        *("--output_dir", tmp_path / "run", "--num_train_epochs", 10, "--max_length", 32),
        *("--per_device_batch_size", 16, "--predictions_file", tmp_path / "predictions.jsonl", "--seed", 1),
    )
    f1 = next(line.split() for line in output.splitlines() if line.startswith("f1 "))
    assert float(f1[1]) > 0.9, output
    predicted = command_output("predict", "--model", tmp_path / "run", "--input", files[1])
    records = [json.loads(line) for line in predicted.splitlines() if line.startswith("{")]
    expected = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert [row["tags"] for row in records] == [row["prediction"] for row in expected]
