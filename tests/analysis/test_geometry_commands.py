"""`analyze similarity`, `geometry`, `senses` and `landscape`, and `evaluate words --contexts`, on tiny models."""

import json
from pathlib import Path

import pytest
from commands import command_output, save, save_summary, tiny_pair

from hf_ctxmodels.analysis.results import AnalysisResult
from hf_ctxmodels.analysis.word_arguments import short_names

TEXTS = [
    f"{subject} {verb} the {noun} near the bank"
    for subject in ("cats", "dogs", "they") for verb in ("see", "like") for noun in ("river", "house")
]  # fmt: skip
LABELS = ("good", "bad", "mixed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Four models, a text, and a treebank."""
    folder = tmp_path_factory.mktemp("models")
    for family in ("bert", "elmo", "glove", "t5"):
        save(folder / family, *tiny_pair(family, "AutoModel", TEXTS))
    (folder / "text.txt").write_text("\n".join(TEXTS) + "\n")
    rows = [f"{number}\t{word}\t_\tNOUN\t_\t_\t0\troot\t_\t_\n" for number, word in enumerate(TEXTS[0].split(), 1)]
    verbs = [row.replace("NOUN", "VERB") for row in rows]
    (folder / "tags.conllu").write_text("\n".join(["".join(rows), "".join(verbs)] * 3) + "\n")
    return folder


def test_short_names():
    assert short_names(["runs/a/bert", "runs/b/gpt/"]) == ["bert", "gpt"]
    assert short_names(["runs/a/bert", "runs/b/bert"]) == ["a/bert", "b/bert"]
    assert short_names(["package/model", "model"]) == ["package", "model"]
    assert short_names(["runs/bert", "runs/bert"]) == ["runs/bert (1)", "runs/bert (2)"]


def test_similarity_command(folder, tmp_path):
    models = [folder / family for family in ("bert", "elmo", "glove")]
    flags = {"text": folder / "text.txt", "output_dir": tmp_path, "seeds": [0, 1], "measures": ["cka", "neurons"]}
    command_output("analyze similarity", model=models, max_words=40, **flags)
    result = AnalysisResult.load(tmp_path / "similarity.json")
    assert [figure.name for figure in result.figures] == ["cka", "neurons"]
    rows = result.figures[0].rows
    assert [row for row in rows if not row.startswith("elmo")] == [*(f"bert {layer}" for layer in range(4)), "glove 0"]
    assert len(result.figures[0].values) == len(rows) == result.tables[0].cells.__len__()
    assert all(abs(result.figures[0].values[row][row] - 1) < 1e-5 for row in range(len(rows)))
    assert "already holds similarity.json" in command_output("analyze similarity", model=models, fails=True, **flags)
    models = [folder / family for family in ("bert", "t5")]
    output = command_output("analyze similarity", model=models, max_words=8, overwrite=True, **flags)
    assert "warning: 8 words are few: with 32 neurons" in output
    caption = AnalysisResult.load(tmp_path / "similarity.json").figures[1].caption
    assert caption.endswith("About 0.78 for independent layers.")
    output = command_output("analyze similarity", model=models, max_words=40, untrained=True, overwrite=True, **flags)
    assert "warning" not in output
    result = AnalysisResult.load(tmp_path / "similarity.json")
    names = ["bert", "bert, untrained", "t5", "t5, untrained"]
    assert list(dict.fromkeys(row.rpartition(" ")[0] for row in result.figures[0].rows)) == names
    values = result.figures[0].values
    layers = len(values) // 4  # trained and untrained weights are initialized with the same seed
    assert all(row[i + layers] == pytest.approx(row[i], abs=1e-4) for row in values for i in range(layers))


def test_geometry_command(folder, tmp_path):
    command_output("analyze geometry", model=[folder / "bert", folder / "glove"], text=folder / "text.txt",
                   output_dir=tmp_path, seeds=[0, 1])  # fmt: skip
    result = AnalysisResult.load(tmp_path / "geometry.json")
    chart = next(figure for figure in result.figures if figure.name == "self-similarity")
    assert chart.series["glove"] == pytest.approx([1, None, None, None])
    assert chart.series["bert"][1] < 1
    values = result.values["bert"]
    corrected = [raw - common for raw, common in zip(values["self-similarity"], values["anisotropy"], strict=True)]
    assert values["self-similarity-corrected"] == pytest.approx(corrected)


def test_senses_command(folder, tmp_path):
    flags = {"model": folder / "bert", "text": folder / "tags.conllu", "output_dir": tmp_path}
    assert "A map has one seed" in command_output("analyze senses", word="bank", seeds=[0, 1], fails=True, **flags)
    command_output("analyze senses", word="bank", **flags)
    result = AnalysisResult.load(tmp_path / "sense-maps.json")
    assert [figure.name for figure in result.figures] == [f"map-0-0-{layer}" for layer in range(4)]
    assert result.figures[0].groups == ["NOUN"] * 3 + ["VERB"] * 3
    assert "[bank]" in result.figures[0].texts[0]
    (tmp_path / "accents.txt").write_text("the élan near the river\n" * 4)
    command_output("analyze senses", model=folder / "bert", text=tmp_path / "accents.txt", word="élan",
                   output_dir=tmp_path / "accents")  # fmt: skip
    (tmp_path / "semcor").mkdir()
    for number in range(4):
        markup = "".join(
            f"<s snum={sense}>\n<wf cmd=ignore>the</wf>\n<wf cmd=done lemma=bank wnsn={sense} lexsn=1:0{sense}:00::>"
            f"bank</wf>\n<wf cmd=ignore>{noun}</wf>\n</s>\n"
            for sense, noun in ((1, "river"), (2, "house"))
        )
        (tmp_path / "semcor" / f"br-{number}").write_text(markup)
    command_output("analyze senses", model=folder / "bert", semcor=tmp_path / "semcor", output_dir=tmp_path)
    result = AnalysisResult.load(tmp_path / "senses.json")
    assert result.tables[0].rows == ["most frequent sense", *(f"layer {layer}" for layer in range(4)), "upper bound"]
    assert [row[0] for row in result.tables[0].cells][-2:] == [1, 1]
    flags = {"model": folder / "bert", "semcor": tmp_path / "semcor", "output_dir": tmp_path / "ranks"}
    assert "probe_ranks=0 is out of range" in command_output("analyze senses", probe_ranks=[2, 0], fails=True, **flags)
    assert "--text needs --word" in command_output(
        "analyze senses", model=folder / "bert", text=folder / "text.txt", output_dir=tmp_path, fails=True
    )


def test_nearest_words_in_context(folder):
    for occurrences in (1, 2):
        output = command_output("evaluate words", model=folder / "bert", contexts=folder / "text.txt", near="bank",
                                occurrences=occurrences)  # fmt: skip
        lines = output.splitlines()
        assert len(lines) == 11 * occurrences
        assert sum(line.startswith("  ") for line in lines) == 10 * occurrences
        assert all("[bank]" in line for line in lines if not line.startswith("  "))
    assert "cannot be combined" in command_output(
        "evaluate words", model=folder / "bert", contexts=folder / "text.txt", analogy=["a", "b", "c"], fails=True
    )


def test_landscape_command(folder, tmp_path):
    """Compare a fine-tuned model with one trained from scratch, with checkpoints of both."""
    auto_class = "AutoModelForSequenceClassification"
    for number, name in enumerate(("tuned", "scratch", "tuned/checkpoint-1", "scratch/checkpoint-1")):
        model, tokenizer = tiny_pair("bert", auto_class, TEXTS, seed=number + 7)
        model.config.id2label = dict(enumerate(LABELS))
        save(tmp_path / name, model, tokenizer)
        save_summary(tmp_path / name, "sequence-classification", max_length=32, columns={"text_columns": "review"})
    lines = [f"{text}\t{'good' if 'river' in text else 'bad'}" for text in TEXTS]
    (tmp_path / "dev.tsv").write_text("\n".join(["review\tlabel", *lines]) + "\n")
    flags = {
        "model": tmp_path / "tuned", "pretrained": folder / "bert", "validation_file": tmp_path / "dev.tsv",
        "output_dir": tmp_path / "out", "points": 3, "plane_points": 3, "max_examples": 6,
    }  # fmt: skip
    views = ["line", "surface", "trajectory", "rollback"]
    command_output("analyze landscape", scratch=tmp_path / "scratch", views=views, **flags)
    result = AnalysisResult.load(tmp_path / "out" / "landscape.json")
    names = [f"{view}-{run}" for view in views[1:3] for run in ("pretrained", "from-scratch")]
    assert [figure.name for figure in result.figures] == ["line-loss", "line-accuracy", *names]
    for first, second in zip(result.figures[2::2], result.figures[3::2], strict=True):
        assert (first.low, first.high) == (second.low, second.high)
    assert result.figures[2].paths["training"][0] == [0, 0]
    assert result.figures[2].paths["training"][-1][0] == pytest.approx(1)
    assert result.tables[1].rows[0] == "fine-tuned"
    assert "layers.0" in " ".join(result.tables[1].rows)
    tuned_loss = result.tables[0].cells[1][0]
    loss_chart = result.figures[0]
    assert loss_chart.x == [-0.5, 0, 0.5, 1, 1.5]
    assert tuned_loss == loss_chart.series["pretrained"][loss_chart.x.index(1)]
    assert not (tmp_path / "out" / "landscape-partial.json").exists()


def test_interrupted_landscape_resumes(folder, tmp_path, monkeypatch):
    tuned, tokenizer = tiny_pair("bert", "AutoModelForSequenceClassification", TEXTS, seed=7)
    tuned.config.id2label = dict(enumerate(LABELS))
    (tmp_path / "dev.tsv").write_text("text\tlabel\n" + "\n".join(f"{text}\tgood" for text in TEXTS) + "\n")
    flags = {
        "model": save(tmp_path / "tuned", tuned, tokenizer), "pretrained": folder / "bert", "views": "neighborhood",
        "validation_file": tmp_path / "dev.tsv", "output_dir": tmp_path / "out", "plane_points": 3,
    }  # fmt: skip
    module = "hf_ctxmodels.cli.analyze_landscape"
    with monkeypatch.context() as patch:
        patch.setattr(f"{module}._SAVE_INTERVAL", 0.0)
        patch.setattr(f"{module}.Surface", None)
        with pytest.raises(TypeError):
            command_output("analyze landscape", **flags)
    partial = json.loads((tmp_path / "out" / "landscape-partial.json").read_text())
    line_results = partial["results"]["line, pretrained"]
    line_results.update({key: {"loss": 7.0, "accuracy": 0.5} for key in line_results})
    (tmp_path / "out" / "landscape-partial.json").write_text(json.dumps(partial))
    assert "7.000" in command_output("analyze landscape", **flags)
    assert "7.000" not in command_output("analyze landscape", overwrite=True, **flags)
    result = AnalysisResult.load(tmp_path / "out" / "landscape.json")
    assert result.figures[0].values[1][1] == pytest.approx(result.tables[0].cells[1][0], rel=1e-5)
    unused_flags = flags | {"other": flags["model"], "views": "line"}
    assert "Only the view surface" in command_output("analyze landscape", overwrite=True, fails=True, **unused_flags)
    flags["pretrained"] = flags["model"]
    assert "has the weights of the pretrained" in command_output(
        "analyze landscape", overwrite=True, fails=True, **flags
    )
