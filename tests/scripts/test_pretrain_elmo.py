"""scripts/pretrain.py on a language model of both directions: another domain, a sampled softmax, several languages."""

import json
import math
import random
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForPreTraining, AutoTokenizer
from zoo import TINY

from hf_ctxmodels import CtxElmoConfig, CtxElmoTokenizer
from hf_ctxmodels.objectives.bidirectional_lm import BidirectionalLM

SCRIPTS = Path(__file__).parents[2] / "scripts"


def run(monkeypatch: pytest.MonkeyPatch, script: str, **flags: object) -> None:
    arguments = [part for name, value in flags.items() for part in (f"--{name}", *str(value).split())]
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    assert stopped.value.code == 0


def pretrain(monkeypatch: pytest.MonkeyPatch, folder: Path, **flags: object) -> None:
    common = {"tokenizer": folder / "tokenizer", "max_length": 24, "per_device_batch_size": 8, "learning_rate": 1e-2}
    run(monkeypatch, "pretrain.py", **common, dataloader_workers=0, save_steps=0, **flags)


def write(file: Path, chains: dict[str, str], documents: int, seed: int) -> list[list[str]]:
    """Documents of three sentences in which each word is followed by one of its own two."""
    rng, texts = random.Random(seed), []
    for _ in range(documents):
        text = []
        for _ in range(3):
            words = [rng.choice(list(chains))]
            while len(words) < 7:
                words.append(rng.choice(chains[words[-1]]))
            text.append(" ".join(words).capitalize() + ".")
        texts.append(text)
    file.write_text("\n\n".join(" ".join(text) for text in texts) + "\n")
    return texts


NEWS = {"a": "bc", "b": "cd", "c": "da", "d": "ab"}
LAW = {"a": "dc", "b": "ad", "c": "ba", "d": "cb"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "news.txt", NEWS, 120, seed=0)
    write(tmp_path / "law.txt", LAW, 120, seed=1)
    fields = {name: value for name, value in TINY.items() if name in CtxElmoConfig.__dataclass_fields__}
    fields |= {"num_characters": 262, "num_hidden_layers": 1, "max_characters_per_token": 50, "initializer_range": 0.05}
    (tmp_path / "tiny.json").write_text(json.dumps(fields))
    CtxElmoTokenizer.train(["a b c d A B C D ."], vocab_size=99, min_count=1).save_pretrained(tmp_path / "tokenizer")
    return tmp_path


@torch.no_grad()
def perplexity(model: Path, tokenizer: Path, documents: list[list[str]]) -> float:
    """Of held-out text, over the whole vocabulary."""
    objective = BidirectionalLM(AutoTokenizer.from_pretrained(tokenizer), max_length=24, seed=0)
    batch: dict[str, Tensor] = objective.collate(list(objective.examples(documents)))
    return math.exp(AutoModelForPreTraining.from_pretrained(model).eval()(**batch).loss)


@pytest.mark.parametrize("options", ["negatives=0", "negatives=6"], ids=["whole softmax", "sampled softmax"])
def test_another_domain_from_a_checkpoint(monkeypatch: pytest.MonkeyPatch, folder: Path, options: str) -> None:
    """What was learned of one domain serves it, and going on from there on another one's text serves that."""
    tokenizer, general, special = folder / "tokenizer", folder / "general", folder / "special"
    new = {"family": "elmo", "config": folder / "tiny.json", "objective_options": options}
    pretrain(monkeypatch, folder, **new, dataset=folder / "news.txt", output_dir=general, max_steps=60)
    news, law = (write(folder / "unseen.txt", chains, 30, seed=2) for chains in (NEWS, LAW))
    learned = perplexity(general, tokenizer, news)
    words = 9  # about as many are equally frequent
    assert learned < 0.6 * words
    before = perplexity(general, tokenizer, law)
    assert before > 1.3 * learned
    went_on = {"model": general, "objective_options": options, "dataset": folder / "law.txt"}
    pretrain(monkeypatch, folder, **went_on, output_dir=special, max_steps=60)
    assert perplexity(special, tokenizer, law) < 0.7 * before


def test_several_languages_by_their_marks(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The two texts have the same words, and only the marks say which of them follow each other."""
    texts = ["a b c d A B C D ."]
    tokenizer = CtxElmoTokenizer.train(texts, vocab_size=99, min_count=1, languages=["en", "de"])
    tokenizer.save_pretrained(folder / "tokenizer")
    data = {"dataset": f"{folder / 'news.txt'} {folder / 'law.txt'}", "dataset_marks": "<en> <de>"}
    out = folder / "both"
    pretrain(monkeypatch, folder, family="elmo", config=folder / "tiny.json", **data, output_dir=out, max_steps=150)
    config = AutoModelForPreTraining.from_pretrained(out).config
    assert (config.num_characters, config.num_languages) == (264, 2)
    unseen = write(folder / "unseen.txt", NEWS, 30, seed=2)
    right, wrong = (
        perplexity(out, folder / "tokenizer", [[f"{mark} {each}" for each in text] for text in unseen])
        for mark in ("<en>", "<de>")
    )
    assert right < 0.8 * wrong
