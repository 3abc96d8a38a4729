"""Examples of probing tasks, control tasks and baselines."""

import math
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_ctxmodels.analysis.annotated_corpora import LabeledSentence
from hf_ctxmodels.analysis.probing import probing_run
from hf_ctxmodels.analysis.probing.controls import (
    ControlTask,
    label_score,
    majority_predictions,
    online_code_length,
    shuffle_sentences,
    uniform_code_length,
)
from hf_ctxmodels.analysis.probing.probing_run import build_data
from hf_ctxmodels.analysis.probing.sentence_tasks import (
    SENTENCE_TASKS,
    divide_sentences,
    label_sentences,
    sentence_task,
)
from hf_ctxmodels.analysis.probing.tasks import (
    Example,
    ExampleSet,
    ProbingTask,
    arc_examples,
    build_treebank_task,
    relation_examples,
)
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.treebanks import TreebankSentence, read_treebank


def parse_sentence(text: str) -> TreebankSentence:
    """A sentence from "word/UPOS/head/relation/features ..."."""
    rows = [word.split("/") for word in text.split()]
    words, upos, heads, relations, features = zip(*([*row, ""][:5] for row in rows))
    size = len(words)
    return TreebankSentence(
        words=[*words], lemmas=[*words], upos=[*upos], xpos=["_"] * size,
        features=[dict(item.split("=") for item in cell.split("|") if item) for cell in features],
        heads=[int(head) - 1 for head in heads], relations=[*relations], misc=[{}] * size, document="",
        location="file:1",
    )  # fmt: skip


CLAUSES = parse_sentence(
    "We/PRON/2/nsubj slept/VERB/0/root/VerbForm=Fin|Tense=Past ,/PUNCT/6/punct and/CCONJ/6/cc they/PRON/6/nsubj "
    "left/VERB/2/conj/VerbForm=Fin|Tense=Past early/ADV/6/advmod ./PUNCT/2/punct"
)


def test_pair_examples() -> None:
    """Relations cover all words, the root is paired with itself; arcs are balanced, and negatives are not heads."""
    relations = relation_examples([CLAUSES]).examples
    assert len(relations) == 8
    assert Example(0, ((1, 2), (1, 2)), ("root",)) in relations
    assert Example(0, ((4, 5), (5, 6)), ("nsubj",)) in relations
    arcs = arc_examples([CLAUSES, parse_sentence("Go/VERB/0/root on/ADV/1/advmod")]).examples
    assert Counter(example.labels[0] for example in arcs) == {"0": 7, "1": 7}
    for _, ((word, _), (candidate, _)), (label,) in arcs:
        assert (CLAUSES.heads[word] == candidate) == (label == "1")
        assert word != candidate


def test_sentence_tasks() -> None:
    labeled = label_sentences("coordinv", [CLAUSES] * 40)
    inverted = next(sentence for sentence in labeled if sentence.label == "inverted")
    assert " ".join(inverted.words) == "They left early , and we slept ."
    shifted = [sentence for sentence in label_sentences("bshift", [CLAUSES] * 40) if sentence.label == "shifted"]
    assert 5 < len(shifted) < 35
    for sentence in shifted:
        moved = [i for i, (word, old) in enumerate(zip(sentence.words, CLAUSES.words, strict=True)) if word != old]
        assert len(moved) == 2
        assert moved[1] == moved[0] + 1
        assert moved[0] > 0
        assert not {",", "."} & {CLAUSES.words[i] for i in moved}
    (tense,) = label_sentences("tense", [CLAUSES])
    assert (tense.label, tense.forms) == ("Past", ("slept",))
    assert [label_sentences(name, [CLAUSES])[0].label for name in ("sentlen", "depdepth")] == ["5-8", "2"]
    assert not label_sentences("sentlen", [parse_sentence("Go/VERB/0/root")])


def chain(length: int) -> TreebankSentence:
    """A sentence whose words depend on the word before, so that its depth is `length - 1`."""
    return parse_sentence(" ".join(f"w{i}/X/{i}/{'dep' if i else 'root'}" for i in range(length)))


def test_numbers_of_subject_and_object() -> None:
    """Of single nouns only, not of pronouns."""
    words = (
        "The/DET/2/det cat/NOUN/3/nsubj:pass/Number=Sing sees/VERB/0/root/VerbForm=Fin|Tense=Pres two/NUM/5/nummod "
        "Dogs/NOUN/3/obj/Number=Plur ./PUNCT/3/punct"
    )
    for name, label, forms in (
        ("subjnum", "Sing", ("cat",)),
        ("objnum", "Plur", ("dogs",)),
        ("tense", "Pres", ("sees",)),
    ):
        (labeled,) = label_sentences(name, [parse_sentence(words)])
        assert (labeled.label, labeled.forms) == (label, forms)
        assert labeled.words == ["The", "cat", "sees", "two", "Dogs", "."]
    assert not label_sentences("subjnum", [CLAUSES])
    assert not label_sentences("objnum", [CLAUSES])
    assert not label_sentences("subjnum", [parse_sentence(words.replace("obj", "nsubj"))]), "two subjects"
    assert not label_sentences("objnum", [parse_sentence(words.replace("Number=Plur", "Number=Ptan"))])
    assert not label_sentences("tense", [parse_sentence(words.replace("VerbForm=Fin", "VerbForm=Part"))])


def test_bins_of_lengths_and_depths() -> None:
    for name, labels in (
        ("sentlen", {4: [], 5: ["5-8"], 8: ["5-8"], 9: ["9-12"], 25: ["21-25"], 26: ["26-28"], 28: ["26-28"], 29: []}),
        ("depdepth", {5: ["4"], 7: ["6"], 8: []}),
    ):
        for length, expected in labels.items():
            assert [sentence.label for sentence in label_sentences(name, [chain(length)])] == expected
    star = " ".join(f"w{i}/X/{1 if i else 0}/dep" for i in range(5))
    assert not label_sentences("depdepth", [parse_sentence(star)]), "depth 1"


def test_content_words_follow_the_200_most_frequent_words() -> None:
    frequent = [f"{first}{second}zz" for first, second in product("abcdefghijklmnopqrst", "abcdefghij")]
    sentences = [frequent[start : start + 5] for start in range(0, 200, 5)] * 3
    sentences += [["Rare", *frequent[:4]], ["rare", *frequent[:4]], ["once", *frequent[:4]], ["few", *frequent[:4]]]
    sentences += [["rare", "both", *frequent[:4]], ["3rd-", *frequent[:4]]]
    trees = [replace(chain(len(words)), words=words) for words in sentences]
    labeled = label_sentences("wc", trees)
    assert [sentence.label for sentence in labeled] == ["rare", "rare", "once"]


def test_inverted_clauses_of_names_and_first_person() -> None:
    """The first word of the sentence keeps its capital if it is a name or "I"."""
    text = (
        "X/PRON/2/nsubj slept/VERB/0/root ,/PUNCT/6/punct or/CCONJ/6/cc we/PRON/6/nsubj left/VERB/2/conj "
        "./PUNCT/2/punct"
    )
    for subject, upos, expected in (("I", "PRON", "I"), ("Anna", "PROPN", "Anna"), ("They", "PRON", "they")):
        sentence = parse_sentence(text.replace("X/PRON", f"{subject}/{upos}"))
        labeled = label_sentences("coordinv", [sentence] * 20)
        versions = {item.label: " ".join(item.words) for item in labeled}
        assert versions == {
            "original": f"{subject} slept , or we left .",
            "inverted": f"We left , or {expected} slept .",
        }
    for old, new in (("we/PRON/6/nsubj", "we/PRON/6/obj"), ("./PUNCT", "now/ADV"), ("or/CCONJ/6", "or/CCONJ/2")):
        assert not label_sentences("coordinv", [parse_sentence(text.replace(old, new))])


@pytest.mark.parametrize("seed", range(3))
def test_word_forms_are_in_one_partition(seed: int) -> None:
    """Labels are balanced in each partition, and no form or sentence is in two."""
    sentences = [
        LabeledSentence([form, str(number)], "Sing" if form in "abcdef" else "Plur", "", (form,))
        for form, count in zip("abcdefghijklm", (30, 9, 5, 4, 3, 3, 40, 8, 7, 3, 3, 2, 2), strict=True)
        for number in range(count)
    ]
    task = divide_sentences("subjnum", sentences, seed)
    forms = [{words[0] for words in examples.sentences} for examples in task.splits.values()]
    assert not forms[0] & forms[1] | forms[0] & forms[2] | forms[1] & forms[2]
    for examples in task.splits.values():
        counts = Counter(example.labels for example in examples.examples)
        assert len(set(counts.values())) == 1
        assert len(counts) == 2
    train, _, test = (len(examples.examples) for examples in task.splits.values())
    assert train > test > 0


def test_invalid_tasks_raise(treebank_files: dict[str, str], tmp_path: Path) -> None:
    """A single label, features without examples, unknown tasks and missing files."""
    with pytest.raises(CtxError, match="only the label"):
        build_treebank_task("pos", {key: [parse_sentence("Go/VERB/0/root")] for key in ("train", "dev", "test")})
    for names, files, message in (
        (["morphology:Case"], treebank_files, "no label"),
        (["pso"], treebank_files, "Unknown task"),
        (["pos"], {"train": treebank_files["train"]}, "Files are missing"),
        (["chunks"], treebank_files | {"dev": str(tmp_path / "none")}, "none"),
    ):
        with pytest.raises((CtxError, OSError), match=message):
            build_data(names, files, [0])


def test_build_data(treebank_files: dict[str, str]) -> None:
    data = build_data(["pos", "morphology:Number", "distance", "tense"], treebank_files, [0, 1], train_sample=10)
    assert len(data.trees["train"]) == 10
    assert len(data.tasks["tense"]) == 2
    counts = data.counts()
    assert counts["morphology:Number"]["labels"] == 2
    assert counts["distance"] == {"train": 10, "dev": 20, "test": 20}
    labeled = [label_sentences(name, read_treebank(treebank_files["train"])) for name in SENTENCE_TASKS]
    assert sum(map(bool, labeled)) >= 6


def test_control_task_labels() -> None:
    """Labels depend only on word type and seed and follow the label distribution of the task."""
    labels = ["A"] * 70 + ["B"] * 30
    control_labels = [ControlTask(labels, 0).label(str(number)) for number in range(4000)]
    assert control_labels == [ControlTask(list(reversed(labels)), 0).label(str(number)) for number in range(4000)]
    assert abs(control_labels.count("A") / 4000 - 0.7) < 0.03
    other_seed = [ControlTask(labels, 1).label(str(number)) for number in range(4000)]
    assert abs(sum(a == b for a, b in zip(control_labels, other_seed, strict=True)) / 4000 - (0.49 + 0.09)) < 0.03


def test_majority_baseline() -> None:
    def words(text: str) -> ExampleSet:
        pairs = [item.split("/") for item in text.split()]
        examples = [Example(0, ((i, i + 1),), (tag,)) for i, (_, tag) in enumerate(pairs)]
        return ExampleSet([[word for word, _ in pairs]], examples)

    train, test = words("run/N run/V run/V cat/N dog/N new/A"), words("run/N cat/N owl/N new/V")
    assert majority_predictions(train, test) == [("V",), ("N",), ("N",), ("A",)]
    assert majority_predictions(train, test, by_words=False) == [("N",)] * 4
    references = [example.labels for example in test.examples]
    assert label_score(majority_predictions(train, test), references) == 0.5
    assert label_score([("1",), ("1",), ("0",)], [("1",), ("0",), ("1",)], "1") == 0.5
    assert label_score([("a", "b"), ("c",)], [("a",), ("d",)]) == pytest.approx(2 / 5)


def test_online_code_length() -> None:
    """Four labels: two bits for each of 3 examples, then two portions with a summed loss of 5 bits each."""
    losses = [5 * math.log(2), 5 * math.log(2)]
    assert online_code_length(3, 4, losses) == pytest.approx(3 * 2 + 5 + 5)
    assert uniform_code_length(18, 4) == 36


def test_portions_of_online_coding() -> None:
    """Portions are whole sentences and cover all examples; small corpora have no empty portions."""
    examples = ExampleSet([["a"] * 3] * 200, [Example(index // 3, ((0, 1),), ("x",)) for index in range(600)])
    order, sizes = shuffle_sentences(examples)
    assert sorted(order) == list(range(600))
    assert all(order[start : start + 3] == list(range(order[start], order[start] + 3)) for start in range(0, 600, 3))
    assert sizes == [3, 6, 9, 18, 36, 75, 150, 300, 600]
    assert shuffle_sentences(ExampleSet([["a"]], [Example(0, ((0, 1),), ("x",))]))[1] == [1]


def test_task_requires_examples_of_each_split() -> None:
    full = ExampleSet([["a", "b"]], [Example(0, ((0, 1),), ("x",)), Example(0, ((1, 2),), ("y",))])
    with pytest.raises(CtxError, match="no example of pos in dev"):
        ProbingTask("pos", {"train": full, "dev": ExampleSet([], []), "test": full})


def test_sentences_without_tokens_do_not_change_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = torch.tensor([[[1.0]], [[3.0]], [[0.0]]])
    has_tokens = torch.tensor([True, True, False])
    monkeypatch.setattr(probing_run, "encode_sentences", lambda *args, **kwargs: (vectors, has_tokens))
    sentences = [LabeledSentence([word], word, "") for word in ("a", "b", "\x00")]
    task = sentence_task("task", {"train": sentences, "dev": sentences, "test": sentences})
    encoder: Any = SimpleNamespace(layers=[0], hidden_size=1)
    representations = probing_run.Representations(encoder, probing_run.ProbingData({"task": [task]}))
    assert representations.labeled(task, [0], [0]).vectors[:3].flatten().tolist() == [-1, 1, 0]
