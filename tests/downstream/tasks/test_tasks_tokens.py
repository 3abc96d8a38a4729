"""Token classification and question answering: reading, encoding and errors."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from seqeval.metrics.sequence_labeling import get_entities
from task_files import make_task, write_file

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.table_files import iob1_to_bio, read_conll, read_conllu
from hf_ctxmodels.downstream.networks.tokenization import CtxTaskNetworkTokenizer
from hf_ctxmodels.downstream.tasks.question_answering import AnswerSpan, best_span
from hf_ctxmodels.models.bert.configuration_bert import CtxBertConfig
from hf_ctxmodels.registry import FAMILIES

CONLL = """-DOCSTART- -X- O O

U.N. NNP I-NP I-ORG
official NN I-NP O
Ekeus NNP I-NP I-PER
Rolf NNP I-NP B-PER

Peter NNP B-NP I-PER
"""


def test_conll_columns_are_read_and_converted(tmp_path):
    sentences = read_conll(write_file(tmp_path / "a.conll", CONLL))
    assert [sentence.words for sentence in sentences] == [["U.N.", "official", "Ekeus", "Rolf"], ["Peter"]]
    assert [sentence.tags for sentence in sentences] == [["B-ORG", "O", "B-PER", "B-PER"], ["B-PER"]]
    assert [sentence.location.rsplit(":")[-1] for sentence in sentences] == ["3", "8"]
    pos = read_conll(tmp_path / "a.conll", 1, 2)
    assert pos[0].tags == ["NNP", "NN", "NNP", "NNP"]


def test_no_break_spaces_are_parts_of_words(tmp_path):
    text = "10\u00a0000 NUM\ntowns\tNOUN \n\n5\u202fkm  NUM\n"
    for name in ("a.conll", "a.txt"):
        file = write_file(tmp_path / name, text)
        assert [sentence.words for sentence in read_conll(file)] == [["10\u00a0000", "towns"], ["5\u202fkm"]]
        task = make_task("token-classification")
        task.labels = ["NUM", "NOUN"]
        assert [sentence.words for sentence in task.read_unlabeled(file)] == [["10\u00a0000", "towns"], ["5\u202fkm"]]


def test_words_with_spaces_in_tab_separated_columns(tmp_path):
    task = make_task("token-classification")
    task.labels = ["LOC", "O"]
    for text in ("New York\tLOC\r\nsaw\tO \r\n", "New York\tx\n\nsaw\ty\n", "New York\t\n\nsaw\t\n"):
        sentences = task.read_unlabeled(write_file(tmp_path / "a.txt", text))
        assert [word for sentence in sentences for word in sentence.words] == ["New York", "saw"]
    sentences = task.read_unlabeled(write_file(tmp_path / "a.txt", "She saw\tNew York\nNew York\tsaw her\n"))
    assert [len(sentence.words) for sentence in sentences] == [4, 4]


@given(st.lists(st.sampled_from(["O", "B-A", "I-A", "B-B", "I-B"]), max_size=12))
def test_bio_conversion_keeps_entities(tags):
    converted = iob1_to_bio(tags)
    assert get_entities(converted) == get_entities(tags)
    assert iob1_to_bio(converted) == converted
    assert sum(tag.startswith("B-") for tag in converted) == len(get_entities(tags))


CONLLU = "# text = du\n1-2\tdu\t_\t_\t_\t_\t_\t_\t_\t_\n1\tde\tde\tADP\t_\t_\t0\troot\t_\t_\n" + (
    "2\tle\tle\tDET\t_\t_\t1\tdet\t_\t_\n2.1\tx\tx\tX\t_\t_\t_\t_\t_\t_\n"
)


def test_conllu_yields_syntactic_words(tmp_path):
    (sentence,) = read_conllu(write_file(tmp_path / "a.conllu", CONLLU), "FORM", "UPOS")
    assert (sentence.words, sentence.tags) == (["de", "le"], ["ADP", "DET"])
    assert read_conllu(tmp_path / "a.conllu", "LEMMA", "DEPREL")[0].tags == ["root", "det"]


@pytest.mark.parametrize(
    ("name", "text", "arguments", "message"),
    [
        ("a.conll", "a O\nb\n", {}, r"(?s)1 column\(s\) in 'b'; expected 2.*a\.conll:2"),
        ("a.conll", "a O\nb O\n", {"label_column": "3"}, r"(?s)its tag in column 3.*a\.conll:1"),
        ("a.conll", "a O\n", {"label_column": "tag"}, r"(?s)numbers, not names"),
        ("a.conll", "-DOCSTART- O\n", {}, "No sentences"),
        ("a.conllu", "1\ta\n", {}, r"(?s)Not a CoNLL-U line.*2 tab-separated.*a\.conllu:1"),
        ("a.conllu", CONLLU, {"label_column": "POS"}, "No column 'POS'. The columns are: 'ID'"),
        ("a.jsonl", '{"tokens": ["a"], "tags": []}', {}, r"(?s)two lists of the same length.*a\.jsonl:1"),
        ("a.jsonl", '{"tokens": ["a", null], "tags": ["O", "O"]}', {}, r"(?s)texts or numbers.*None.*a\.jsonl:1"),
        ("a.jsonl", '{"tokens": ["a"], "tags": [NaN]}', {}, r"(?s)texts or numbers.*nan.*a\.jsonl:1"),
        ("demo", None, {}, "no demo data"),
    ],
)
def test_invalid_tagging_file_error_and_location(tmp_path, name, text, arguments, message):
    file = name if text is None else write_file(tmp_path / name, text)
    with pytest.raises(CtxError, match=message):
        make_task("token-classification", **arguments).read(file, "train")


def test_first_subword_is_labeled_and_each_word_predicted(tmp_path, tokenizer):
    words = ["sailor", "mended", "unrelatedness", "\u200b", *["neighbor", "garden"] * 8]
    tags = ["B-PER", "O", "B-LOC", "O", *["I-LOC", "O"] * 8]
    file = write_file(tmp_path / "a.jsonl", json.dumps({"tokens": words, "tags": tags}))
    task = make_task("token-classification", max_length=9)
    examples = task.read(file, "train")
    config = CtxBertConfig()
    task.configure(config, examples, [])
    assert task.labels == ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
    encoded = task.encode(examples, tokenizer)
    assert len(encoded.features) > 1
    assert max(len(feature["input_ids"]) for feature in encoded.features) <= 9
    # The tokenizer drops the zero-width space; each other word has one target.
    targets = [label for feature in encoded.features for label in feature["labels"] if label != -100]
    assert targets == [task.labels.index(tag) for tag in (examples[0].tags[:3] + examples[0].tags[4:])]

    oracle = [{"logits": np.eye(5)[np.maximum(feature["labels"], 0)]} for feature in encoded.features]
    predictions = task.decode(examples, encoded, oracle)
    assert predictions == [examples[0].tags]
    assert task.score(examples, predictions)["f1"] == 1.0
    batch = task.collator(tokenizer)(encoded.features[-2:])
    assert batch["labels"].shape == batch["input_ids"].shape


def test_tagging_baseline_is_most_frequent_tag(tmp_path):
    task = make_task("token-classification")
    train = task.read(
        write_file(tmp_path / "a.conll", "run VERB\nrun VERB\nrun NOUN\nof ADP\nin ADP\nto ADP\nat ADP\n"), "train"
    )
    validation = task.read(write_file(tmp_path / "b.conll", "run NOUN\nzebra NOUN\n"), "validation")
    task.configure(CtxBertConfig(), train, validation)
    assert task.baseline(train, validation) == [["VERB", "ADP"]]
    assert list(task.score(validation, [["NOUN", "ADP"]])) == ["accuracy", "f1_macro"]


def squad_file(path, *questions):
    """questions: (question, context, [(start, text), ...])"""
    paragraphs = []
    for i, (question, context, spans) in enumerate(questions):
        answers = [{"text": text, "answer_start": start} for start, text in spans]
        entry = {"id": f"q{i}", "question": question, "is_impossible": not answers, "answers": answers}
        paragraphs.append({"context": context, "qas": [entry]})
    return write_file(path, json.dumps({"data": [{"title": "t", "paragraphs": paragraphs}]}))


CONTEXT = " ".join(f"The old sailor mended the bridge {number} times." for number in range(40))


def oracle_outputs(encoded):
    outputs = []
    for feature in encoded.features:
        start, end = np.zeros(len(feature["input_ids"])), np.zeros(len(feature["input_ids"]))
        start[feature["start_positions"]] = end[feature["end_positions"]] = 5.0
        outputs.append({"start_logits": start, "end_logits": end})
    return outputs


@pytest.mark.parametrize("padding_side", ["right", "left"])
def test_windows_cover_context_and_answer(tmp_path, tokenizer, padding_side, monkeypatch):
    monkeypatch.setattr(tokenizer, "padding_side", padding_side)
    pos = CONTEXT.index("bridge 23 times")
    file = squad_file(tmp_path / "a.json", ("How often?", CONTEXT, [(pos, "bridge 23 times")]), ("Who?", "Nobody.", []))
    task = make_task("question-answering", max_length=40, doc_stride=12)
    examples = task.read(file, "train")
    task.configure(CtxBertConfig(), examples, [])
    encoded = task.encode(examples, tokenizer)
    assert all(len(feature["input_ids"]) <= 40 for feature in encoded.features)
    windows = [window for window in encoded.origins if window.example == 0]
    covered = {character for w in windows for begin, end in w.spans for character in range(max(begin, 0), end)}
    assert covered == {i for i, character in enumerate(CONTEXT) if character != " "}
    for first, second in itertools.pairwise(windows):
        shared = {tuple(span) for span in first.spans} & {tuple(span) for span in second.spans}
        assert len(shared - {(-1, -1)}) == 12

    answer_windows = [
        w for w, f in zip(encoded.origins, encoded.features, strict=True) if f["start_positions"] != w.null_position
    ]
    assert 1 <= len(answer_windows) < len(windows)
    assert task.decode(examples, encoded, oracle_outputs(encoded))[0].text == "bridge 23 times"
    assert task.decode(examples, encoded, oracle_outputs(encoded))[1].text == ""

    # Padding shifts the positions.
    batch = task.collator(tokenizer)(encoded.features)
    for row, (feature, window) in enumerate(zip(encoded.features, encoded.origins, strict=True)):
        start = int(batch["start_positions"][row])
        assert batch["input_ids"][row, start] == feature["input_ids"][feature["start_positions"]]
        assert bool(batch["attention_mask"][row, start])
        assert window.spans.shape == (len(feature["input_ids"]), 2)


MARKED_CONTEXTS = {  # context -> answers
    "wo ist das cafe\u0301": ["cafe\u0301", "das cafe\u0301"],
    "jose\u0301 und andre\u0301 nai\u0308ve": ["jose\u0301", "andre\u0301", "nai\u0308ve"],
    "العَرَبِيَّةُ لُغَةٌ جَمِيلَةٌ": ["العَرَبِيَّةُ", "لُغَةٌ", "جَمِيلَةٌ"],
    "हिन्दी भाषा सुंदर की": ["हिन्दी", "भाषा", "की"],
    "שָׁלוֹם עוֹלָם": ["שָׁלוֹם", "עוֹלָם"],
    "\u1112\u1161\u11ab\u1100\u116e\u11a8\u110b\u1165 \u1106\u1161\u11af": [
        "\u1112\u1161\u11ab\u1100\u116e\u11a8\u110b\u1165", "\u1106\u1161\u11af",
    ],
}  # fmt: skip


@pytest.mark.parametrize("family", ["bert", "xlnet", "roberta", "xlm", "t5", "elmo", "cove"])
def test_answers_include_last_marks(tmp_path, family):
    """Also marks that the tokenizer strips or composes, and at the end of the context."""
    tokenizer = FAMILIES[family].tokenizer.train([*MARKED_CONTEXTS] * 5, vocab_size=900)
    pairs = [(context, answer) for context, answers in MARKED_CONTEXTS.items() for answer in answers]
    rows = [("what", context, [(context.index(answer), answer)]) for context, answer in pairs]
    task = make_task("question-answering", max_length=90, doc_stride=2)
    examples = task.read(squad_file(tmp_path / "a.json", *rows), "train")
    task.configure(CtxBertConfig(), examples, [])
    encoded = task.encode(examples, tokenizer)
    predictions = task.decode(examples, encoded, oracle_outputs(encoded))
    assert [prediction.text for prediction in predictions] == [answer for _, answer in pairs]


def test_long_questions_are_truncated(tmp_path, tokenizer):
    file = squad_file(tmp_path / "a.json", ("who " * 500, CONTEXT, [(0, "The")]))
    task = make_task("question-answering", max_length=100, doc_stride=5)
    examples = task.read(file, "train")
    features = task.encode(examples, tokenizer).features
    assert {len(feature["input_ids"]) for feature in features[:-1]} == {100}
    with pytest.raises(CtxError, match=r"33 for the context.*\(64\)"):
        make_task("question-answering", max_length=100, doc_stride=33).encode(examples, tokenizer)
    with pytest.raises(CtxError, match=r"have 0 for the context") as error:
        make_task("question-answering", max_length=60, doc_stride=5).encode(examples, tokenizer)
    assert error.value.hint == "raise --max_length."


@pytest.mark.parametrize(("question", "context"), [(" ", "Nobody saw."), ("Who?", " ")])
def test_question_without_words_of_a_task_network_names_its_location(tmp_path, question, context):
    task = make_task("question-answering", max_length=40)
    examples = task.read(squad_file(tmp_path / "a.json", ("Who?", "A.", []), (question, context, [])), "train")
    with pytest.raises(CtxError, match=r"has no words") as error:
        task.encode(examples, CtxTaskNetworkTokenizer.from_words([]))
    assert error.value.location == f"{tmp_path}/a.json, question 'q1'"


def test_no_answer_is_decoded_from_null_logits(tmp_path, tokenizer):
    task = make_task("question-answering", max_length=40)
    examples = task.read(squad_file(tmp_path / "a.json", ("Who?", "Nobody saw.", [])), "train")
    task.configure(CtxBertConfig(), examples, [])
    encoded = task.encode(examples, tokenizer)
    zero = np.zeros(len(encoded.features[0]["input_ids"]))
    null = zero.copy()
    null[encoded.origins[0].null_position] = 1.0
    (no_answer,) = task.decode(examples, encoded, [{"start_logits": null, "end_logits": null}])
    assert no_answer == AnswerSpan("", pytest.approx(1 / (1 + np.exp(-2.0))))
    (answer,) = task.decode(examples, encoded, [{"start_logits": -null, "end_logits": -null}])
    assert answer.text
    assert task.score(examples, [no_answer])["exact"] == 100.0
    assert task.score(examples, [answer])["NoAns_f1"] == 0.0
    assert task.baseline(examples, examples) == [AnswerSpan("", 1.0)]


@given(st.integers(1, 9), st.integers(1, 5), st.randoms(use_true_random=False))
def test_best_span_matches_exhaustive_search(length, max_length, random):
    start, end = (np.array([random.uniform(-1, 1) for _ in range(length)]) for _ in range(2))
    allowed = np.array([random.random() < 0.7 for _ in range(length)])
    spans = [(i, j) for i in range(length) for j in range(i, min(i + max_length, length)) if allowed[i] and allowed[j]]
    score, first, last = best_span(start, end, allowed, max_length)
    if not spans:
        assert score == -np.inf
    else:
        assert (first, last) == max(spans, key=lambda span: start[span[0]] + end[span[1]])
        assert score == start[first] + end[last]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{]", "Invalid JSON"),
        ('{"data": [{"paragraphs": [{"qas": []}]}]}', "no questions"),
        ('{"data": [{"paragraphs": [{"qas": [{"id": 1}]}]}]}', "KeyError: 'answers'"),
        (None, r"(?s)'cat' is not at character 3.*found ' ca'.*question 'q0'"),
    ],
)
def test_invalid_squad_file_error(tmp_path, content, message):
    file = tmp_path / "a.json"
    if content is None:
        squad_file(file, ("Who?", "The cat.", [(3, "cat")]))
    else:
        write_file(file, content)
    with pytest.raises(CtxError, match=message):
        make_task("question-answering").read(str(file), "train")


def test_windows_of_xquad_contain_answers(shared_data, tokenizer):
    task = make_task("question-answering", max_length=384, max_answer_length=384)
    examples = task.read(str(shared_data / "qa" / "xquad.en.json.gz"), "train")[:120]
    task.configure(CtxBertConfig(), examples, [])
    encoded = task.encode(examples, tokenizer)
    assert len(encoded.features) > len(examples)
    assert task.score(examples, task.decode(examples, encoded, oracle_outputs(encoded)))["f1"] > 99.0


def test_tagging_files_have_published_sentence_counts(shared_data):
    read = make_task("token-classification").read
    folder = shared_data / "ner_pos"
    assert len(read(str(folder / "conll2003" / "eng.testa.gz"), "train")) == 3250
    assert len(read(str(folder / "wnut17" / "emerging.dev.conll.gz"), "train")) == 1009
    sentences = read(str(folder / "ud_english_ewt" / "en_ewt-ud-dev.conllu.gz"), "train")
    assert (len(sentences), sum(len(sentence.words) for sentence in sentences)) == (2001, 25147)
