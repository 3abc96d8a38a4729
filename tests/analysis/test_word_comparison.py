"""Comparison of two language models with different tokenizers, and its report."""

import json
import math
from pathlib import Path

import pytest
import torch
from commands import command_output, save
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from zoo import Case

from hf_ctxmodels import CtxError
from hf_ctxmodels.analysis.explorer.explored_model import ExploredModel
from hf_ctxmodels.analysis.results import AnalysisResult
from hf_ctxmodels.analysis.word_comparison import TextComparison, WordScores, comparison_result, score_words
from hf_ctxmodels.evaluation import score_tokens
from hf_ctxmodels.evaluation.scoring import load_language_model, predict_tokens
from hf_ctxmodels.registry import FAMILIES

TEXTS = ["The cat saw the red boat.", "Nobody praised a small garden!", "the bridge"]
LANGUAGE_MODELS = {
    "gpt2": "AutoModelForCausalLM",
    "bert": "AutoModelForMaskedLM",
    "xlnet": "AutoModelForCausalLM",
    "ulmfit": "AutoModelForCausalLM",
    "elmo": "AutoModelForPreTraining",
}


def build_model(family: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = FAMILIES[family].tokenizer.train([text for text in TEXTS for _ in range(5)], vocab_size=280)
    special_ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    torch.manual_seed(0)
    return Case(FAMILIES[family], LANGUAGE_MODELS[family]).model(vocab_size=len(tokenizer), **special_ids), tokenizer


@pytest.mark.parametrize("family", LANGUAGE_MODELS)
def test_word_scores_sum_token_scores(family):
    model, tokenizer = build_model(family)
    scores = score_words(model, tokenizer, TEXTS[0])
    assert scores.words == ["The", "cat", "saw", "the", "red", "boat", "."]
    tokens = {token.position: token for token in score_tokens(model, tokenizer, TEXTS[0])}
    offsets = tokenizer(TEXTS[0], return_offsets_mapping=True)["offset_mapping"]
    start = TEXTS[0].index("cat")
    spans = {position: offsets[position] for position in tokens if position < len(offsets)}
    # a token of the preceding space has the offsets (start, start)
    word_tokens = [tokens[i] for i, (begin, end) in spans.items() if start < end <= start + 3 or begin == end == start]
    assert scores.log_probabilities[1] == pytest.approx(sum(token.log_probability for token in word_tokens))
    assert scores.ranks[1] == max(token.rank for token in word_tokens)
    assert len(scores.predictions[1]) == 5
    assert all(value is None or value < 0 for value in scores.log_probabilities)
    assert [value is None for value in scores.log_probabilities[1:]] == [False] * 6


def test_identical_models_have_no_differences():
    scores = [score_words(*build_model("bert"), TEXTS[0])] * 2
    comparison = TextComparison(TEXTS[0], tuple(scores))
    assert comparison.differences == [0.0] * 7
    result = comparison_result([comparison], ["a", "b"], ["pseudo-log-likelihood"] * 2)
    first, second = result.tables[0].cells
    assert first == second
    mean = sum(scores[0].log_probabilities) / 7
    assert first[1:4] == [7, pytest.approx(mean), pytest.approx(math.exp(-mean))]


def test_tables_and_figures_of_constructed_scores():
    """Two texts; the first model does not predict first words."""
    words = [*"abcdefghij"]
    long_first = WordScores(
        words, [None, *[-1.0] * 6, -4.0, *[-1.0] * 2], [None, *[1] * 6, 20, 1, 1], [[], *[["u", "v"]] * 9]
    )
    long_second = WordScores(
        words, [-3.0, -1.0, *[-1.5] * 5, -1.0, *[-1.5] * 2], [5, 2, 11, *[2] * 4, 1, 2, 2], [["w"]] * 10
    )
    short = WordScores(["x", "y"], [None, -2.0], [None, 10], [[], ["y"]])
    short_second = WordScores(["x", "y"], [-0.5, -2.5], [3, 1], [["x"], ["z"]])
    comparisons = [
        TextComparison("x y", (short, short_second)),
        TextComparison("a b c d e f g h i j " * 4, (long_first, long_second)),
    ]
    result = comparison_result(comparisons, ["one", "two"], ["log-likelihood"] * 2, max_figures=1)
    summary, largest = result.tables
    assert summary.note == ""
    pseudo_scores = comparison_result(comparisons, ["one", "two"], ["pseudo-log-likelihood"] * 2)
    assert pseudo_scores.tables[0].note.startswith("Pseudo-log-likelihoods")
    assert summary.cells == [
        ["log-likelihood", 10, pytest.approx(-1.4), pytest.approx(math.exp(1.4)), 0.8, 0.9, 1],
        ["log-likelihood", 10, pytest.approx(-1.5), pytest.approx(math.exp(1.5)), 0.2, 0.9, 2],
    ]
    assert largest.columns == ["word in context", "log P, one", "log P, two", "difference", "rank, one", "rank, two"]
    assert largest.rows == [*"hycdefgijb"]
    assert largest.cells[0] == ["b c d e f g [h] i j", -4, -1, -3, 20, 1]
    assert largest.cells[1] == ["x [y]", -2, -2.5, 0.5, 10, 1]
    assert largest.cells[-1] == ["a [b] c d e", -1, -1, 0, 1, 2]
    scatter, figure = result.figures
    assert scatter.points[:2] + scatter.points[7:8] == [[-2, -2.5], [-1, -1], [-4, -1]]
    assert [scatter.groups[i] for i in (0, 1, 7)] == ["higher under one", "higher under two", "higher under two"]
    assert scatter.texts[0] == "y (-2.00 and -2.50): x y"
    assert figure.title == "a b c d e f g h i j a b c d e f g h i j a b c d e f g h i j…"
    assert figure.columns == {
        "log P, one": long_first.log_probabilities,
        "rank, one": long_first.ranks,
        "log P, two": long_second.log_probabilities,
        "rank, two": long_second.ranks,
        "difference": [None, 0, *[0.5] * 5, -3, 0.5, 0.5],
    }
    assert figure.texts[:2] == ["two predicts: w", "one predicts: u, v\ntwo predicts: w"]
    assert f"Mean absolute difference: {(3 + 7 * 0.5) / 9:.2f}." in figure.caption


def test_long_texts_and_models_without_lm_head(tmp_path: Path):
    model, tokenizer = build_model("bert")
    assert score_words(model, tokenizer, "cat " * 1000) is None
    with pytest.raises(CtxError, match="is not a language model"):
        score_words(model.base_model, tokenizer, TEXTS[0])
    save(tmp_path, model.base_model, tokenizer)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": None}))
    with pytest.raises(CtxError, match="has no head of CtxBertForMaskedLM"):
        load_language_model(str(tmp_path))


def test_start_token_counts_towards_the_maximum_length():
    model, tokenizer = build_model("gpt2")
    tokenizer.model_max_length = model.config.max_sequence_length
    text = "t" * tokenizer.model_max_length
    assert len(tokenizer(text)["input_ids"]) == tokenizer.model_max_length
    assert score_words(model, tokenizer, text) is None
    assert score_words(model, tokenizer, text[1:]) is not None
    explored = ExploredModel("gpt2", model, tokenizer)
    for action in (explored.predict, explored.score_words):
        action(text[1:])
        with pytest.raises(CtxError, match="the limit is"):
            action(text)


@pytest.mark.parametrize(("family", "position"), [("bert", 3), ("xlnet", 2), ("elmo", 3)])
def test_predictions_ignore_masked_words(family: str, position: int):
    model, tokenizer = build_model(family)
    texts = [f"the cat {word} the bridge" for word in ("saw", "red", tokenizer.mask_token or "___")]
    first, *others = (predict_tokens(model, tokenizer, text, [position])[0] for text in texts)
    assert float(first.exp().sum()) == pytest.approx(1)
    for prediction in others:
        torch.testing.assert_close(prediction, first)
    score = next(token for token in score_tokens(model, tokenizer, texts[0]) if token.position == position)
    assert score.predictions == first.topk(5).indices.tolist()
    assert [row.tolist() for row in predict_tokens(model, tokenizer, texts[0], [position] * 2)] == [first.tolist()] * 2
    if family != "elmo":
        special = tokenizer(texts[0], return_special_tokens_mask=True)["special_tokens_mask"].index(1)
        with pytest.raises(CtxError, match=f"does not predict the token at position {special} of 'the cat saw"):
            predict_tokens(model, tokenizer, texts[0], [position, special])
    if family == "xlnet":  # blanks do not attend to each other: the mask token is untrained
        before = predict_tokens(model, tokenizer, "<mask> cat <mask> the bridge", [0, 2])
        with torch.no_grad():
            model.get_input_embeddings().weight[tokenizer.mask_token_id] += 10
        after = predict_tokens(model, tokenizer, "<mask> cat <mask> the bridge", [0, 2])
        # except the mask token itself: its embedding is tied to the output
        for first, second in zip(before, after, strict=True):
            others = torch.arange(len(first)) != tokenizer.mask_token_id
            torch.testing.assert_close(first[others].log_softmax(0), second[others].log_softmax(0))


def test_compare_command_and_report(tmp_path: Path):
    for family in ("gpt2", "bert"):
        model, tokenizer = build_model(family)
        model.save_pretrained(tmp_path / family)
        tokenizer.save_pretrained(tmp_path / family)
    (tmp_path / "text.txt").write_text("\n".join([*TEXTS, "cat " * 1000]))
    flags = {"text": tmp_path / "text.txt", "output_dir": tmp_path / "analyses", "max_figures": 2}
    models = ["--model", tmp_path / "gpt2", tmp_path / "bert"]
    output = command_output("analyze compare", *models, **flags)
    assert "pseudo-log-likelihood" in output
    result = AnalysisResult.load(tmp_path / "analyses" / "compare.json")
    assert [figure.name for figure in result.figures] == ["words", "text-1", "text-2"]
    assert (result.figures[0].x_label, result.figures[0].y_label) == ("log P, gpt2", "log P, bert")
    assert "differ in kind" in result.tables[0].note
    texts = result.values["texts"]
    assert [text["text"] for text in texts] == TEXTS
    differences = [abs(row[3]) for row in result.tables[1].cells]
    assert differences == sorted(differences, reverse=True)
    [row_index] = [i for i, row in enumerate(result.tables[1].cells) if row[0] == "The [cat] saw the red"]
    scores = texts[0]["log_probabilities"]
    assert result.tables[1].cells[row_index][1:4] == pytest.approx(
        [scores["gpt2"][1], scores["bert"][1], scores["gpt2"][1] - scores["bert"][1]]
    )
    assert json.loads((tmp_path / "analyses" / "compare.json").read_text())["settings"]["texts"] == 3
    assert "already holds" in command_output("analyze compare", *models, **flags, fails=True)
    assert "not 1" in command_output("analyze compare", *models[:2], **flags, fails=True)
    command_output("analyze report", tmp_path / "analyses", output=tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert all(text in page for text in ("Largest differences", "rank, gpt2", TEXTS[0]))
