"""Sequence-to-sequence tasks: reading, encoding, scores, errors, and pairs made from other data."""

import json
import sys

import numpy as np
import pytest
from task_files import make_task, write_file
from transformers import BartConfig

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.padding import SourceTargetCollator
from hf_ctxmodels.downstream.tasks import text_metrics
from hf_ctxmodels.downstream.tasks.question_answering import Question, read_squad
from hf_ctxmodels.downstream.tasks.seq2seq import SourceTarget
from hf_ctxmodels.downstream.tasks.seq2seq_pairs import PairLimits, question_pairs, split_questions, summary_pairs
from hf_ctxmodels.models.bert.configuration_bert import CtxBertConfig
from hf_ctxmodels.models.cove.configuration_cove import CtxCoveConfig
from hf_ctxmodels.models.cove.tokenization_cove import CtxCoveTokenizer
from hf_ctxmodels.models.laser.configuration_laser import CtxLaserConfig
from hf_ctxmodels.models.laser.tokenization_laser import CtxLaserTokenizer
from hf_ctxmodels.models.mass.configuration_mass import CtxMassConfig
from hf_ctxmodels.models.mass.tokenization_mass import CtxMassTokenizer

PAIRS = [("A cat sat. It slept.", "Eine Katze saß."), ("A dog saw a cat!", "Ein Hund sah."), ("A cat.", "Katze")]
METRICS = "bleu,exact_match"


@pytest.fixture
def word_tokenizer() -> CtxCoveTokenizer:
    return CtxCoveTokenizer.train(map("\t".join, PAIRS), vocab_size=60, min_count=1, min_target_count=1)


def prepare(tmp_path, tokenizer, pairs=PAIRS, **arguments):
    task = make_task("seq2seq", **{"metrics": METRICS, **arguments})
    lines = [json.dumps({"source": source, "target": target}) for source, target in pairs]
    examples = task.read(write_file(tmp_path / "a.jsonl", "\n".join(lines)), "train")
    fields = task.config_fields(tokenizer)
    config = CtxLaserConfig if "num_languages" in fields else CtxCoveConfig
    task.configure(config(**fields), examples, examples)
    return task, examples


@pytest.mark.parametrize("side", ["right", "left"])
def test_sources_and_targets_are_padded(tmp_path, word_tokenizer, side):
    word_tokenizer.padding_side = side
    task, examples = prepare(tmp_path, word_tokenizer)
    features = task.encode(examples, word_tokenizer).features
    batch = task.collator(word_tokenizer)([feature | {"epoch": 0, "example_index": 3} for feature in features])
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    width = max(len(feature["input_ids"]) for feature in features)
    for row, (source, target) in enumerate(PAIRS):
        ids, labels = word_tokenizer(source).input_ids, word_tokenizer(text_target=target).input_ids
        padding = [word_tokenizer.pad_token_id] * (width - len(ids))
        assert batch["input_ids"][row].tolist() == (padding + ids if side == "left" else ids + padding)
        assert batch["input_ids"][row][batch["attention_mask"][row] == 1].tolist() == ids
        assert labels[-1] == word_tokenizer.target_end_id
        assert batch["labels"][row].tolist() == labels + [-100] * (batch["labels"].shape[1] - len(labels))


def test_decoding_and_scores(tmp_path, word_tokenizer):
    task, examples = prepare(tmp_path, word_tokenizer)
    encoded = task.encode(examples, word_tokenizer)
    start, end = word_tokenizer.target_start_id, word_tokenizer.target_end_id
    outputs = [{"sequences": np.array([start, *feature["labels"], end, 0])} for feature in encoded.features]
    predictions = task.decode(examples, encoded, outputs)
    assert predictions == [target for _, target in PAIRS]
    assert task.score(examples, predictions)["exact_match"] == 1
    assert task.score(examples, ["Eine  Katze saß. ", "ein Hund sah.", "Hund"])["exact_match"] == pytest.approx(1 / 3)
    assert list(task.score(examples, predictions)) == ["bleu", "exact_match"], "the main metric comes first"
    assert task.record(examples[2], "Hund")["target"] == "Katze"


def test_upper_bound_of_unencodable_targets(tmp_path, word_tokenizer):
    """The bound is the score of the decoded targets; there is none if decoding restores all targets."""
    task, examples = prepare(tmp_path, word_tokenizer)
    assert not task.upper_bounds(examples), "before encoding"
    task.encode(examples, word_tokenizer)
    assert not task.upper_bounds(examples)
    assert list(task.score(examples, [""] * 3)) == ["bleu", "exact_match"]
    pairs = [("a cat.", "eine Katze saß da heute."), ("a dog.", "ein hund sah."), ("a cat.", "ein hund sah.")]
    lower_case = CtxCoveTokenizer.train(
        map("\t".join, pairs[:2]), 60, min_count=1, min_target_count=1, target_lower_case=True
    )
    task, examples = prepare(tmp_path, lower_case, [*pairs, ("it.", "ein Elch sah.")])
    task.encode(examples, lower_case)
    decoded = ["eine katze saß da heute.", "ein hund sah.", "ein hund sah.", "ein[UNK] sah."]
    targets = [example.target for example in examples]
    bound = text_metrics.score_texts(["bleu", "exact_match"], decoded, targets)
    assert task.upper_bounds(examples) == bound
    assert bound["exact_match"] == 0.5
    scores = task.score(examples, decoded)
    assert scores == bound | {"bleu_normalized": pytest.approx(100), "exact_match_normalized": 1.0}
    assert next(iter(scores)) == "bleu", "the main metric still compares with the targets"
    assert task.score(examples, targets)["exact_match_normalized"] == 0.5


def test_baseline_is_the_better_of_two(tmp_path, word_tokenizer):
    lead = [(f"{target} Mehr.", target) for _, target in PAIRS[:2]] * 2
    for pairs, name in ((lead, "the first sentence of the source"), ([(t, t) for _, t in lead], "the source itself")):
        task, examples = prepare(tmp_path, word_tokenizer, pairs)
        assert task.baseline([], examples) == [target for _, target in pairs]
        assert task.baseline_name == name


def test_target_language_is_in_batch(tmp_path):
    texts = ["a cat\t<de> eine Katze", "eine Katze\t<en> a cat"]
    tokenizer = CtxLaserTokenizer.train(texts * 3, vocab_size=60)
    task, examples = prepare(tmp_path, tokenizer, target_language="<en>")
    batch = task.collator(tokenizer)(task.encode(examples, tokenizer).features)
    assert batch["target_languages"].tolist() == [tokenizer.languages.index("<en>")] * 3
    assert task.config_fields(tokenizer)["num_languages"] == 2
    task, examples = prepare(tmp_path, tokenizer, target_language="<fr>")
    with pytest.raises(CtxError, match=r"(?s)does not generate '<fr>'.*<de>, <en>"):
        task.encode(examples, tokenizer)
    tokenizer = CtxMassTokenizer.train(["<de> eine Katze", "<en> a cat"], vocab_size=60)
    task.configure(CtxMassConfig(n_langs=1, lang2id={"de": 0}), examples, examples)
    with pytest.raises(CtxError, match=r"(?s)does not generate '<fr>'.*leave the language out"):
        task.encode(examples, tokenizer)


@pytest.mark.parametrize(
    ("pair", "arguments", "message"),
    [
        (("\t", "Katze"), {}, r"(?s)No text in column\(s\) source.*jsonl:4"),
        (("A cat.", " "), {}, r"(?s)No text in column\(s\) target.*jsonl:4"),
        ((5 * "A cat. ", "Katze"), {}, r"(?s)1 of 4 sources have more than 9 tokens, the longest \d+.*--max_length 9"),
        (("A cat.", 9 * "Katze "), {}, r"(?s)1 of 4 targets have more than 8 tokens, the longest 10.*--max_target_l"),
        (("A cat.", "Katze"), {"metrics": "bleu,blue"}, r"(?s)no metric 'blue'.*rouge, bleu, exact_match"),
        (("A cat.", "Katze"), {"metrics": "bleu,bleu"}, "occurs twice"),
        (("A cat.", "Katze"), {"num_beams": 0}, "num_beams=0 is out of range"),
        (("A cat.", "Katze"), {"text_columns": "source,target"}, r"(?s)1 columns, got 2.*--text_columns"),
    ],
)
def test_invalid_data_error_and_location(tmp_path, word_tokenizer, pair, arguments, message):
    def read_and_encode():
        task, examples = prepare(
            tmp_path, word_tokenizer, [*PAIRS, pair], max_length=9, max_target_length=8, **arguments
        )
        task.encode(examples, word_tokenizer)

    with pytest.raises(CtxError, match=message):
        read_and_encode()


def test_long_sources_are_truncated_on_request(tmp_path, word_tokenizer):
    task, examples = prepare(tmp_path, word_tokenizer, max_length=4, cut_sources=True)
    assert [feature["input_ids"] for feature in task.encode(examples, word_tokenizer).features] == [
        word_tokenizer(source).input_ids[:4] for source, _ in PAIRS
    ]


def test_unsupported_models_and_tokenizers_raise(tmp_path, word_tokenizer, tokenizer):
    task, examples = prepare(tmp_path, word_tokenizer)
    with pytest.raises(CtxError, match="CtxBertConfig has no class for AutoModelForSeq2SeqLM"):
        task.configure(CtxBertConfig(), examples, examples)
    with pytest.raises(CtxError, match="no end-of-sequence token"):
        task.configure(CtxCoveConfig(eos_token_id=None), examples, examples)
    with pytest.raises(CtxError, match=r"limit of 100 positions(.|\n)*--max_length 128"):
        task.configure(BartConfig(max_position_embeddings=100), examples, examples)
    task.configure(CtxCoveConfig(eos_token_id=149), examples, examples)
    with pytest.raises(CtxError, match=r"CtxBertTokenizer adds no end-of-sequence token.*eos_token_id 149"):
        task.encode(examples, tokenizer)
    task.configure(CtxCoveConfig(eos_token_id=tokenizer.sep_token_id), examples, examples)
    for pair, side in ((("\x01", "the cat"), "source"), (("the cat", "\x01"), "target")):
        with pytest.raises(CtxError, match=rf"(?s)The {side} has no tokens: '\\x01'.*a:1"):
            task.encode([SourceTarget(*pair, "a:1")], tokenizer)
    word_tokenizer.pad_token = None
    with pytest.raises(CtxError, match="no pad_token"):
        task.collator(word_tokenizer)


def test_decoder_start_token_is_removed_from_targets(tokenizer):
    """The collator removes the token only where it comes first, as the command does."""
    start, end = tokenizer.cls_token_id, tokenizer.sep_token_id
    features = [{"input_ids": [9], "labels": [start, 7, 8, end]}, {"input_ids": [9, 9], "labels": [7, start, end]}]
    labels = [[7, 8, end], [7, start, end]]
    assert SourceTargetCollator(tokenizer, start)(features)["labels"].tolist() == labels
    labels_with_start = [[start, 7, 8, end], [7, start, end, -100]]
    assert SourceTargetCollator(tokenizer)(features)["labels"].tolist() == labels_with_start


def test_missing_package_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    with pytest.raises(CtxError, match=r"(?s)rouge_score.*hf_ctxmodels\[generation\]"):
        text_metrics.metric_names("bleu,rouge")


def test_case_insensitive_bleu():
    texts = (["Eine Katze sitzt da ."], ["eine katze sitzt da ."])
    assert text_metrics.corpus_bleu(*texts, lower_case=True).score == pytest.approx(100)
    assert text_metrics.corpus_bleu(*texts).score < 50
    assert text_metrics.exact_match(*texts, lower_case=True) == {"exact_match": 1.0}
    with pytest.raises(CtxError, match="2 texts, 1 references"):
        text_metrics.corpus_bleu(["a", "b"], ["a"])


def test_rouge_scores():
    pytest.importorskip("rouge_score", reason="needs the extra `generation`")
    scores = text_metrics.rouge(["the cat sat on it", "a"], ["on the cat it sat", "a"])
    # words: 5 of 5; pairs: 1 (the cat) of 4; longest subsequence: the cat sat, or the cat it: 3 of 5
    assert scores == {
        "rouge1": 1.0,
        "rouge2": pytest.approx(0.125),
        "rougeL": pytest.approx(0.8),
        "rougeLsum": pytest.approx(0.8),
    }


def test_rouge_lsum_matches_sentences():
    """Reordered sentences: `rougeLsum` matches sentences, `rougeL` whole texts, as in T5."""
    pytest.importorskip("rouge_score", reason="needs the extra `generation`")
    sentences = ["the cat sat down . ", "a dog ran away . "]
    scores = text_metrics.rouge(["".join(sentences[::-1])], ["".join(sentences)])
    assert scores["rougeL"] == pytest.approx(4 / 8)
    assert scores["rougeLsum"] == pytest.approx(1)
    lines = [text.replace(" . ", "\n") for text in sentences]
    assert text_metrics.rouge(["".join(lines[::-1])], ["".join(lines)]) == pytest.approx(scores)


def test_summaries_are_first_sentences():
    limits = PairLimits(min_target=2, max_target=4, min_source=3, max_source=6)
    documents = [
        ["A title here", "One two three.", "Four  five six.", "Seven."],
        ["Short", "One two three."],
        ["A title of too many words", "One two three."],
        ["A title", "One two."],
        ["A title", "One. A title again."],
        ["One sentence alone stands"],
    ]
    assert list(summary_pairs(documents, limits)) == [("One two three. Four five six.", "A title here")]


def test_question_pairs_contain_answer_sentences():
    text = "It rained. The cat sat. \nThe dog ran home. It slept."
    limits = PairLimits(min_target=2, max_source=13)
    questions = [
        Question("1", "Who sat?", text, ((text.index("cat"), "cat"),), "1"),
        Question("2", "What is told?", text, ((text.index("cat"), "cat sat. \nThe dog"),), "2"),
        Question("3", "Why not so?", text, (), "3"),
        Question("4", "Why?", text, ((0, "It"),), "4"),
    ]
    assert list(question_pairs(questions, limits)) == [
        ("answer: cat context: The cat sat.", "Who sat?"),
        ("answer: cat sat. The dog context: The cat sat. The dog ran home.", "What is told?"),
    ]
    assert len(list(question_pairs(questions, PairLimits(min_target=2, max_source=5)))) == 0


def test_questions_are_split_by_context(shared_data):
    questions = read_squad(str(shared_data / "qa" / "xquad.en.json.gz"))
    training, validation = split_questions(questions, 0.1)
    assert len(training) + len(validation) == len(questions) == 1190
    assert not {question.context for question in training} & {question.context for question in validation}
    assert len({question.context for question in validation}) == 24
    for source, target in question_pairs(validation, PairLimits()):
        answer, context = source.removeprefix("answer: ").split(" context: ")
        assert answer in context
        assert target
    with pytest.raises(CtxError, match="leaves one split empty"):
        split_questions(questions[:1], 0.1)
