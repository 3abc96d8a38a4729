"""From two files of lines to translations and their BLEU, by the scripts."""

import random
import runpy
import sys
from pathlib import Path

import pytest
import torch
from sacrebleu import corpus_bleu
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_ctxmodels import CtxError
from hf_ctxmodels.inference import score_translations, translate
from hf_ctxmodels.registry import FAMILIES

SCRIPTS = Path(__file__).parents[2] / "scripts"
TRANSLATING = [
    name
    for name, family in FAMILIES.items()
    if "AutoModelForSeq2SeqLM" in family.models and next(iter(family.objectives.values())).reads_translations
]
WORDS = {"red": "rot", "cat": "Katze", "sees": "sieht", "one": "ein", "big": "groß", "dog": "Hund"}


def run(monkeypatch: pytest.MonkeyPatch, script: str, **flags: object) -> int:
    arguments = [part for name, value in flags.items() for part in (f"--{name}", *str(value).split())]
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    return stopped.value.code


def write(folder: Path, name: str, lines: int, seed: int) -> dict[str, Path]:
    """Texts, and word by word their translations, in the reverse order."""
    rng = random.Random(seed)
    texts = [rng.choices(list(WORDS), k=rng.randint(2, 3)) for _ in range(lines)]
    paths = {language: folder / f"{name}.{language}" for language in ("en", "de")}
    paths["en"].write_text("".join(" ".join(text) + ".\n" for text in texts))
    paths["de"].write_text("".join(" ".join(WORDS[word] for word in text[::-1]) + ".\n" for text in texts))
    return paths


@pytest.mark.parametrize("family", TRANSLATING)
def test_learns_to_translate(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    train, test = write(tmp_path, "train", 600, seed=0), write(tmp_path, "test", 40, seed=1)
    data = {"dataset": train["en"], "translations": train["de"], "family": family}
    hidden, length, demanded = 32, 120, 50  # BLEU; the best text that is always the same one gets 13
    if any(objective.reads_language_tags for objective in FAMILIES[family].objectives.values()):
        data["language_tags"] = "<de>"
        hidden, length, demanded = 96, 250, 20  # a sentence's vector is all that the decoder has
    tokenizer, model, written = (tmp_path / name for name in ("tokenizer", "model", "written.txt"))
    assert run(monkeypatch, "train_tokenizer.py", **data, vocab_size=50, output_dir=tokenizer) == 0
    assert "unknown tokens   0.00%" in capsys.readouterr().out
    sizes = f"embedding_size=16 hidden_size={hidden} num_hidden_layers=1 hidden_dropout_prob=0"
    steps = {"max_steps": length, "learning_rate": 1e-2, "per_device_batch_size": 32, "dataloader_workers": 0}
    output = {"output_dir": model, "save_steps": 0, "config_options": sizes, "tokenizer": tokenizer}
    assert run(monkeypatch, "pretrain.py", **data, **steps, **output, validation_fraction=0.05, max_length=12) == 0
    capsys.readouterr()
    files = {"model": model, "input": test["en"], "references": test["de"], "output_file": written}
    assert run(monkeypatch, "translate.py", **files, num_beams=3, batch_size=7) == 0
    printed = capsys.readouterr().out
    texts, references = written.read_text().splitlines(), test["de"].read_text().splitlines()
    bleu = corpus_bleu(texts, [references]).score
    assert f"BLEU {bleu:.2f}  nrefs:1|case:mixed" in printed
    assert bleu > demanded, "reversing the words and their translation was not learned"
    opened, words = AutoModelForSeq2SeqLM.from_pretrained(model), AutoTokenizer.from_pretrained(tokenizer)
    sources = test["en"].read_text().splitlines()
    torch.manual_seed(0)
    assert translate(opened, words, sources, num_beams=3, batch_size=40) == texts, "whatever stands beside a text"
    assert translate(opened, words, sources[:1]) == translate(opened, words, sources)[:1]
    with pytest.raises(CtxError, match="Text 1"):
        translate(opened, words, ["a cat", " "])


def test_without_translations_pretraining_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    train = write(tmp_path, "train", 30, seed=0)
    data = {"dataset": train["en"], "translations": train["de"], "family": "cove"}
    assert run(monkeypatch, "train_tokenizer.py", **data, vocab_size=50, output_dir=tmp_path / "tokenizer") == 0
    (tmp_path / "text.txt").write_text("red cat.\n")
    flags = {"family": "cove", "dataset": tmp_path / "text.txt", "tokenizer": tmp_path / "tokenizer", "max_steps": 1}
    assert run(monkeypatch, "pretrain.py", **flags, output_dir=tmp_path / "model") == 2
    assert "--translations" in capsys.readouterr().err


def test_scores_of_other_numbers_are_refused() -> None:
    with pytest.raises(CtxError, match="2 translations, 1 references"):
        score_translations(["a", "b"], ["a"])
    assert score_translations(["Eine Katze sitzt da ."], ["eine katze sitzt da ."], lower_case=True).bleu == (
        pytest.approx(100)
    )
