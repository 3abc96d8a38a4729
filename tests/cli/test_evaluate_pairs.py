"""`hf-ctxmodels evaluate pairs`: accuracies of the model and of the unigram baseline."""

import gzip
import json
from pathlib import Path

import pytest
from forked import run_forked
from zoo import Case

from hf_ctxmodels.evaluation import MinimalPair, PairResult, evaluate_pairs, read_pairs, total_result, unigram_scorer
from hf_ctxmodels.inference import score
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.tokenizers.word_level import CtxWordTokenizer

COMMAND = ("-m", "hf_ctxmodels", "evaluate", "pairs")
TEXTS = ["the cat saw a small garden", "a dog carried seven letters over the bridge", "the dog saw the cat"]
PAIRS = [
    ("the cat saw a garden", "the cat saw a letters", "agreement"),
    ("the dog saw the cat", "the dog saw the seven", "agreement"),
    ("seven letters", "letters seven", "order"),
]


def write_pairs(path: Path, rows: list[tuple[str, str, str]]) -> Path:
    keys = ("sentence_good", "sentence_bad", "linguistics_term")
    lines = [json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows]
    with gzip.open(path, "wt") as file:
        file.writelines(lines)
    return path


def test_results() -> None:
    """A tie counts half; unigrams have the frequencies of the text, also for unknown words."""
    pairs = [MinimalPair("aa", "a", "x"), MinimalPair("a", "a", "x"), MinimalPair("a", "aa", "y")]
    results = evaluate_pairs(pairs, lambda texts: [len(text) for text in texts])
    assert results == {"x": PairResult(1.5, 2), "y": PairResult(0.0, 1)}
    assert total_result(results.values()).accuracy == 0.5
    tokenizer = CtxWordTokenizer.train(["a b c"], vocab_size=9, min_count=1)
    scores = unigram_scorer(tokenizer, ["a b", "a"])(["a", "b", "c", "a b", "b a"])
    assert scores[0] > scores[1] > scores[2] > -10
    assert scores[3] == pytest.approx(scores[0] + scores[1]) == scores[4]


def test_command(tmp_path: Path) -> None:
    """A family whose saved head and language model are not the first of its Auto classes."""
    family = FAMILIES["bert"]
    tokenizer = family.tokenizer.train(TEXTS * 5, vocab_size=120)
    model = Case(family, "AutoModelForMaskedLM").model(vocab_size=len(tokenizer))
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    pairs = write_pairs(tmp_path / "pairs.jsonl.gz", PAIRS)
    (tmp_path / "text.txt").write_text("\n".join(TEXTS))
    flags = ("--model", tmp_path / "model", "--pairs", pairs, "--unigram_text", tmp_path / "text.txt")
    done = run_forked(*COMMAND, *flags)
    assert done.returncode == 0, done.stderr
    assert "newly initialised" not in done.stderr
    scores = [[text.log_probability for text in score(model, tokenizer, row[:2])] for row in PAIRS]
    right = [good > bad for good, bad in scores]
    lines = {line.split()[0]: line.split() for line in done.stdout.splitlines()}
    for name, rows in (("agreement", right[:2]), ("order", right[2:]), ("all", right)):
        accuracy = sum(rows) / len(rows)
        assert lines[name][2] == f"{accuracy:.4f}"
        assert float(lines[name][6]) == pytest.approx(accuracy - float(lines[name][4]), abs=1e-4)
        assert lines[name][7:] == [str(len(rows)), "pairs"]
    assert lines["order"][4] == "0.5000", "equal words in another order"
    fewer = run_forked(*COMMAND, *flags, "--max_pairs", 1)
    assert fewer.stdout.splitlines()[-1].endswith(" 1 pairs")


def test_errors(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a b\n")
    (tmp_path / "pairs.jsonl").write_text('{"sentence_good": "a b"}\n')
    flags = ("--unigram_text", tmp_path / "text.txt", "--pairs", tmp_path / "pairs.jsonl")
    done = run_forked(*COMMAND, "--model", tmp_path, *flags)
    assert done.returncode != 0
    assert "pairs.jsonl, line 1" in done.stderr
    assert "Traceback" not in done.stderr
    family = FAMILIES["infersent"]
    tokenizer = family.tokenizer.train(TEXTS * 5, vocab_size=50)
    for part in (tokenizer, Case(family, "AutoModel").model(vocab_size=len(tokenizer))):
        part.save_pretrained(tmp_path / "model")
    pairs = write_pairs(tmp_path / "pairs.jsonl.gz", PAIRS)
    done = run_forked(*COMMAND, "--model", tmp_path / "model", *flags[:2], "--pairs", pairs)
    assert done.returncode != 0
    assert "'infersent' has no language model" in done.stderr


def test_pairs_of_blimp(shared_data: Path) -> None:
    pairs = read_pairs(shared_data / "blimp" / "causative.jsonl.gz")
    assert len(pairs) == 1000
    assert pairs[0] == MinimalPair("Aaron breaks the glass.", "Aaron appeared the glass.", "argument_structure")
