"""`hf-ctxmodels evaluate words`, `sentences` and `pairs`, on models with known results."""

import gzip
import json
import math
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from commands import command_output, run_command, save, tiny_pair
from datasets import Dataset
from torch import Tensor
from zoo import Case

from hf_ctxmodels import CtxError, CtxXLMConfig, CtxXLMModel, CtxXLMTokenizer
from hf_ctxmodels.cli.evaluate import read_translations, retrieval_lines, split_tables
from hf_ctxmodels.conversion.word_vectors import WordVectors
from hf_ctxmodels.evaluation import (
    MinimalPair,
    PairResult,
    evaluate_pairs,
    read_pairs,
    sentence_tests,
    total_result,
    unigram_scorer,
)
from hf_ctxmodels.inference import encode_sentences, score
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.tokenizers.word_level import CtxWordTokenizer

WORDS = ["man", "king", "woman", "queen", "apple", "pear"]
VECTORS = [[1, 0, 0.1], [1, 1, 0.1], [-1, 0, 0.1], [-1, 1, 0.1], [0, 0.1, 1], [0, 0.2, 1.1]]
TRANSLATED_WORDS = ["cat", "dog", "tree", "katze", "hund", "baum"]
TRANSLATED_VECTORS = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0.1, 0], [0, 1, 0.1], [0.1, 0, 1]]
TEXTS = ["the cat saw a small garden", "a dog carried seven letters over the bridge", "the dog saw the cat"]
PAIRS = [
    ("the cat saw a garden", "the cat saw a letters", "agreement"),
    ("the dog saw the cat", "the dog saw the seven", "agreement"),
    ("seven letters", "letters seven", "order"),
]


def save_vectors(folder: Path, family: str, words: list[str], vectors: list[list[float]]) -> Path:
    matrix = np.array(vectors, dtype=np.float32)
    return save(folder, *WordVectors(words, matrix, lower_case=True).to_model(family))


@pytest.fixture(scope="module")
def translations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vectors(tmp_path_factory.mktemp("model"), "glove", TRANSLATED_WORDS, TRANSLATED_VECTORS)


def printed_lines(capsys: pytest.CaptureFixture) -> list[str]:
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("family", ["word2vec", "glove"])
def test_evaluate_words(family: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = save_vectors(tmp_path / "model", family, WORDS, VECTORS)
    (tmp_path / "pairs.txt").write_text("apple\tpear\t9.5\nman\twoman\t1\nking\tman\t6\nkiwi\tpear\t8\n")
    (tmp_path / "questions.txt").write_text(": royal\nman king woman queen\n: fruit\nman apple kiwi pear\n")
    files = {"similarity": tmp_path / "pairs.txt", "analogies": tmp_path / "questions.txt"}
    flags = {"model": model, **files, "near": "apple", "analogy": ["man", "king", "woman"]}
    assert run_command("evaluate", "words", **flags) == 0
    lines = printed_lines(capsys)
    assert "pairs.txt spearman 1.0000 3 of 4 pairs" in lines
    assert "range: spearman -1 to 1" in lines
    assert "royal accuracy 100.0% 1 of 1 questions" in lines
    assert "fruit accuracy - 0 of 1 questions" in lines
    assert "all accuracy 100.0% 1 of 2 questions" in lines
    assert any(line.startswith("apple: pear 0.99") for line in lines)
    assert any(line.startswith("man : king = woman : queen") for line in lines)


def test_words_of_contextual_model_raise(tmp_path: Path) -> None:
    model = save(tmp_path, *tiny_pair("bert", "AutoModel", TEXTS))
    assert "last_hidden_state" in command_output("evaluate words", model=model, near="bank", fails=True)


def test_evaluate_sentences(translations: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    pairs, table, texts = tmp_path / "pairs.csv", tmp_path / "rows.tsv", []
    pairs.write_text("cat,katze,5\ncat dog,dog,3\ncat,tree,0\n")
    rows = [f"{word} {translation}\t{word}" for word in TRANSLATED_WORDS[:3] for translation in TRANSLATED_WORDS[3:]]
    table.write_text("\n".join(["text\tlabel", *rows * 4]) + "\n")
    for name, words in (("en", TRANSLATED_WORDS[:3]), ("de", TRANSLATED_WORDS[3:])):
        texts.append(tmp_path / f"text.{name}.txt")
        texts[-1].write_text("\n".join(words) + "\n")
    flags = {"similarity": f"{pairs}=1,2,3", "relatedness": f"{pairs},{pairs}=1,2,3"}
    flags |= {"classification": f"{table},{table}=text,label", "retrieval": ",".join(map(str, texts))}
    monkeypatch.setattr(sentence_tests, "read_table", read := Mock(wraps=sentence_tests.read_table))
    assert run_command("evaluate", "sentences", model=translations, **flags) == 0
    assert read.call_count == 5, "a table is read once"
    lines = printed_lines(capsys)
    assert lines[0].startswith("pairs.csv spearman 1.0000")
    assert lines[0].endswith("3 pairs")
    assert "pairs.csv spearman 1.0000 pearson 0.99" in lines[1], "the test pairs are the training pairs"
    assert "majority 0.33" in lines[2]
    assert lines[3] == "text.en.txt -> text.de.txt cosine 1.0000 margin 1.0000 3 pairs"
    assert lines[4].startswith("text.de.txt -> text.en.txt cosine 1.0000")
    assert lines[5] == "range: spearman -1 to 1, pearson -1 to 1, accuracy 0 to 1, cosine 0 to 1, margin 0 to 1"


def test_retrieval_uses_language_of_each_file(tmp_path: Path) -> None:
    """Each file is encoded in its own language; a missing language raises."""
    texts = {"en": ["a cat", "a dog ran"], "de": ["eine Katze", "ein Hund lief"]}
    tagged = [f"<{code}> {text}" for code, lines in texts.items() for text in lines]
    tokenizer = CtxXLMTokenizer.train(tagged, 60, min_frequency=1)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = CtxXLMModel(CtxXLMConfig(vocab_size=len(tokenizer), n_langs=2, lang2id=tokenizer.lang2id, **sizes))
    for code, lines in texts.items():
        (tmp_path / f"text.{code}.txt").write_text("\n".join(lines))
    encoded = {}

    def encode(lines: list[str]) -> Tensor:
        vectors = encode_sentences(model, tokenizer, lines, pooling="mean")
        encoded[tokenizer.language] = vectors
        return vectors

    files_by_language = ",".join(f"{code}={tmp_path / f'text.{code}.txt'}" for code in texts)
    assert "text.en.txt -> text.de.txt" in retrieval_lines(encode, tokenizer, read_translations(files_by_language))[0]
    assert [*encoded] == ["en", "de"]
    tokenizer.language = "en"
    wrong_language = encode_sentences(model, tokenizer, texts["de"], pooling="mean")
    assert (wrong_language - encoded["de"]).abs().max() > 1e-3
    tokenizer.language = None
    files = ",".join(str(tmp_path / f"text.{code}.txt") for code in texts)
    with pytest.raises(CtxError, match="langs is missing"):
        retrieval_lines(encode, tokenizer, read_translations(files))


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        ("words", {"analogy": ["man", "king"]}, "three words"),
        ("words", {"similarity": "nothing.txt"}, "No such file"),
        ("words", {"similarity": "nan.txt"}, "nan.txt, line 3"),
        ("sentences", {"relatedness": "pair.csv,pair.csv=1,2,3"}, "There is one training pair"),
        ("words", {"near": ["katze", "kiwi"]}, "No vector of 'kiwi'.\n  where: --near"),
        ("words", {"analogy": ["hund", "Katze", "kiwi"]}, "--analogy"),
        ("words", {"near": "king", "most_frequent": 0}, "most_frequent=0 is out of range"),
        (
            "words",
            {"near": "katze", "layer": 0, "occurrences": 5},
            "--layer and --occurrences can be used only with --contexts",
        ),
        ("words", {}, "nothing to evaluate"),
        ("sentences", {}, "nothing to evaluate"),
        ("sentences", {"similarity": "pairs.csv"}, "pairs.csv"),
        ("sentences", {"relatedness": "one.csv=1,2,3"}, "one.csv=1,2,3"),
        ("sentences", {"classification": "one.tsv=text,label"}, "one.tsv=text,label"),
        ("sentences", {"retrieval": "one.txt"}, "one.txt"),
        ("sentences", {"retrieval": "en=one.txt,two.txt"}, "en=one.txt,two.txt"),
        ("sentences", {"similarity": "rated.csv=1,2,3", "retrieval": "en=one.txt,de=two.txt"}, "has no languages"),
        ("sentences", {"similarity": "nothing.csv=1,2,3"}, "No such file"),
    ],
)
def test_errors(
    translations: Path,
    command: str,
    flags: dict,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text("katze\n")
    (tmp_path / "nan.txt").write_text("cat\tdog\t1\n\ncat\ttree\tnan\n")
    (tmp_path / "pair.csv").write_text("cat,dog,1\n")
    (tmp_path / "rated.csv").write_text("cat,dog,1\ncat,tree,0\n")
    monkeypatch.setattr("hf_ctxmodels.cli.evaluate.encode_sentences", lambda *args, **kwargs: pytest.fail("encoded"))
    assert run_command("evaluate", command, model=translations, **flags) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"similarity": "{folder}/rated.csv=1,2"}, "Expected three columns, got 2"),
        ({"relatedness": "{folder}/rated.csv,{folder}/labeled.csv=1,2,3"}, "labeled.csv"),
        ({"relatedness": "{folder}/rated.csv=1,2,3"}, "Invalid value"),
        (
            {"similarity": "{folder}/pair.csv=1,2,3"},
            "All ratings are 5; the correlation",
        ),
        ({"relatedness": "{folder}/rated.csv,{folder}/pair.csv=1,2,3"}, "All ratings are 5"),
        ({"relatedness": "{folder}/pair.csv,{folder}/rated.csv=1,2,3"}, "There is one training pair"),
        ({"classification": "{folder}/labeled.csv=text,label"}, "Invalid value"),
        ({"classification": "{folder}/labeled.csv,{folder}/labeled.csv=text,mood"}, "No column 'mood'"),
        ({"classification": "{folder}/labeled.csv,{folder}/labeled.csv=text,mood"}, "use column names of the file"),
        ({"classification": "{folder}/labeled.csv,{folder}/labeled.csv=label"}, "Expected two or three columns"),
        ({"classification": "{folder}/labeled.csv,{folder}/unseen.csv=text,label"}, "the test data has 'fish'"),
        ({"retrieval": "{folder}/text.txt"}, "Invalid value"),
        ({"retrieval": "{folder}/text.txt,{folder}/blank.txt"}, "blank.txt:2"),
        ({"retrieval": "{folder}/text.txt,{folder}/long.txt"}, "Got 1 sentences and 2 translations"),
    ],
)
def test_files_of_sentence_tests_are_checked_before_the_model_is_loaded(
    flags: dict[str, str], message: str, tmp_path: Path
) -> None:
    contents = {"rated.csv": "cat,katze,5\ncat,hund,1\n", "pair.csv": "cat,katze,5\n"}
    contents |= {"labeled.csv": "text,label\ncat,pet\ntree,plant\n"}
    contents |= {"unseen.csv": "text,label\ncat,pet\ncod,fish\n", "text.txt": "cat\n", "long.txt": "katze\nhund\n"}
    contents |= {"blank.txt": "katze\n\nhund\n"}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    flags = {"similarity": f"{tmp_path}/rated.csv=1,2,3", "model": "missing/model"} | {
        name: text.replace("{folder}", str(tmp_path)) for name, text in flags.items()
    }
    assert message in command_output("evaluate sentences", fails=True, **flags)


def write_pairs(path: Path) -> Path:
    keys = ("sentence_good", "sentence_bad", "linguistics_term")
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(dict(zip(keys, pair, strict=True))) + "\n" for pair in PAIRS)
    return path


def test_pair_results_and_unigram_scores() -> None:
    """A tie counts half, nan makes the accuracy nan; unigram probabilities are frequencies, also of unknown words."""
    pairs = [MinimalPair("aa", "a", "x"), MinimalPair("a", "a", "x"), MinimalPair("a", "aa", "y")]
    results = evaluate_pairs(pairs, lambda texts: [len(text) for text in texts])
    assert results == {"x": PairResult(1.5, 2), "y": PairResult(0.0, 1)}
    assert total_result(results.values()).accuracy == 0.5
    tokenizer = CtxWordTokenizer.train(["a b c"], vocab_size=9, min_count=1)
    scores = unigram_scorer(tokenizer, ["a b", "a"])(["a", "b", "c", "a b", "b a"])
    assert scores[0] > scores[1] > scores[2] > -10
    assert scores[3] == pytest.approx(scores[0] + scores[1]) == scores[4]
    tokenizer.model_max_length = 2
    unigram_scorer(tokenizer, ["a b c"])
    assert not tokenizer.deprecation_warnings  # the tokens are counted, no model reads them
    assert math.isnan(total_result(evaluate_pairs(pairs, lambda texts: [math.nan] * len(texts)).values()).accuracy)


def test_evaluate_pairs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """BERT, whose masked LM is not the first of its Auto classes."""
    family = FAMILIES["bert"]
    tokenizer = family.tokenizer.train(TEXTS * 5, vocab_size=120)
    model = Case(family, "AutoModelForMaskedLM").model(vocab_size=len(tokenizer))
    (tmp_path / "text.txt").write_text("\n".join(TEXTS))
    flags = {"model": save(tmp_path / "model", model, tokenizer), "pairs": write_pairs(tmp_path / "pairs.jsonl.gz")}
    flags["unigram_text"] = tmp_path / "text.txt"
    assert run_command("evaluate", "pairs", **flags) == 0
    printed = capsys.readouterr()
    assert "newly initialized" not in printed.err
    scores = [[text.log_probability for text in score(model, tokenizer, pair[:2])] for pair in PAIRS]
    correct = [good > bad for good, bad in scores]
    lines = {line.split()[0]: line.split() for line in printed.out.splitlines()}
    for name, results in (("agreement", correct[:2]), ("order", correct[2:]), ("all", correct)):
        accuracy = sum(results) / len(results)
        assert lines[name][2] == f"{accuracy:.4f}"
        assert float(lines[name][6]) == pytest.approx(accuracy - float(lines[name][4]), abs=1e-4)
        assert lines[name][7:] == [str(len(results)), "pairs"]
    assert lines["order"][4] == "0.5000", "same words in another order"
    assert run_command("evaluate", "pairs", max_pairs=1, **flags) == 0
    *_, total_line, ranges = capsys.readouterr().out.splitlines()
    assert total_line.endswith(" 1 pairs")
    assert ranges == "range: accuracy 0 to 1, unigram 0 to 1"

    (tmp_path / "blank.txt").write_text("\n \n")
    (tmp_path / "incomplete.jsonl").write_text('{"sentence_good": "a b"}\n')
    infersent = FAMILIES["infersent"]
    tokenizer = infersent.tokenizer.train(TEXTS * 5, vocab_size=50)
    encoder = Case(infersent, "AutoModel").model(vocab_size=len(tokenizer))
    gpt2_tokenizer = FAMILIES["gpt2"].tokenizer.train(TEXTS * 5, vocab_size=300)
    gpt2 = Case(FAMILIES["gpt2"], "AutoModelForCausalLM").model(vocab_size=len(gpt2_tokenizer))
    causal = {"model": save(tmp_path / "gpt2", gpt2, gpt2_tokenizer), "pll_metric": "within_word_l2r"}
    for overrides, message in (
        (causal, "CtxGpt2ForCausalLM computes log-likelihoods"),
        ({"pairs": tmp_path / "incomplete.jsonl"}, "incomplete.jsonl:1"),
        ({"unigram_text": [tmp_path / "text.txt", tmp_path / "blank.txt"]}, "--unigram_text"),
        ({"model": save(tmp_path / "encoder", encoder, tokenizer)}, "'infersent' has no language model"),
    ):
        assert run_command("evaluate", "pairs", **flags | overrides) == 2
        assert message in capsys.readouterr().err


def test_read_zorro_pairs(shared_data: Path, tmp_path: Path) -> None:
    name = "agreement_determiner_noun-between_neighbors"
    pairs = read_pairs(shared_data / "zorro" / f"{name}.txt.gz")
    assert len(pairs) == 2000
    assert pairs[0] == MinimalPair("this color must be white .", "this colors must be white .", name)
    for text, message in (("one sentence .\n", "an even number of lines"), ("a .\n\n", "without empty ones")):
        (tmp_path / "pairs.txt").write_text(text)
        with pytest.raises(CtxError, match=message):
            read_pairs(tmp_path / "pairs.txt")


def test_read_blimp_pairs(shared_data: Path) -> None:
    pairs = read_pairs(shared_data / "blimp" / "causative.jsonl.gz")
    assert len(pairs) == 1000
    assert pairs[0] == MinimalPair("Aaron breaks the glass.", "Aaron appeared the glass.", "argument_structure")


def test_read_pairs_of_dataset(tmp_path: Path) -> None:
    row = {"sentence_good": "Aaron breaks it.", "sentence_bad": "Aaron appeared it.", "linguistics_term": "arguments"}
    Dataset.from_list([row]).save_to_disk(tmp_path / "blimp")
    assert read_pairs(str(tmp_path / "blimp")) == [MinimalPair(*row.values())]


def test_datasets_of_classification_tasks() -> None:
    """The options of datasets have commas, like the list of tables."""
    sources = ["org/name:config=x,split=train", "org/name:config=x,split=test"]
    value = f"{','.join(sources)}=text,label"
    assert split_tables("classification", [value]) == [(sources, ["text", "label"])]
    assert split_tables("similarity", [f"{sources[0]}=a,b,c"]) == [(sources[:1], ["a", "b", "c"])]
