"""`hf-ctxmodels pretrain` of ELMo: another domain, a sampled softmax, several languages."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
from commands import run_command
from torch import Tensor
from transformers import AutoModelForPreTraining, AutoTokenizer
from zoo import TINY

from hf_ctxmodels import CtxElmoConfig, CtxElmoTokenizer
from hf_ctxmodels.objectives.autoregressive.bidirectional_lm import BidirectionalLM


def run(monkeypatch: pytest.MonkeyPatch, command: str, **flags: object) -> None:
    arguments = [part for name, value in flags.items() for part in (f"--{name}", *str(value).split())]
    assert run_command(command, *arguments) == 0


def pretrain(monkeypatch: pytest.MonkeyPatch, folder: Path, **flags: object) -> None:
    common = {
        "tokenizer": folder / "tokenizer",
        "per_device_batch_size": 16,
        "learning_rate": 3e-2,
        "warmup_steps": 0.1,
    }
    run(monkeypatch, "pretrain", **common, dataloader_workers=0, save_steps=0, **flags)


def write(file: Path, following: dict[str, str], words: int, documents: int, seed: int) -> list[list[str]]:
    """Documents of three sentences of so many words, of which the first says all others."""
    rng, texts = random.Random(seed), []
    for _ in range(documents):
        text = []
        for _ in range(3):
            sentence = [rng.choice(list(following))]
            while len(sentence) < words:
                sentence.append(following[sentence[-1]])
            text.append(" ".join(sentence).capitalize() + ".")
        texts.append(text)
    file.write_text("\n\n".join(" ".join(text) for text in texts) + "\n")
    return texts


NEWS = {"a": "b", "b": "c", "c": "d", "d": "a"}
STEPS = 300
LAW = {next_: word for word, next_ in NEWS.items()}  # the same words the other way round
TEXT = ["a b c d A B C D ."]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fields = {name: value for name, value in TINY.items() if name in CtxElmoConfig.__dataclass_fields__}
    fields |= {"num_characters": 262, "num_hidden_layers": 1, "max_characters_per_token": 50}
    fields |= {"character_embedding_size": 16, "filters": [[1, 32], [2, 32]]}  # words are soon told apart
    (tmp_path / "tiny.json").write_text(json.dumps(fields))
    return tmp_path


def batch_of(tokenizer: Path, documents: list[list[str]], max_length: int) -> dict[str, Tensor]:
    objective = BidirectionalLM(AutoTokenizer.from_pretrained(tokenizer), max_length=max_length, seed=0)
    return objective.collate(list(objective.examples(documents)))


@torch.no_grad()
def perplexity(model: Path, batch: dict[str, Tensor]) -> float:
    """Over the whole vocabulary."""
    return math.exp(AutoModelForPreTraining.from_pretrained(model).eval()(**batch).loss)


@pytest.mark.parametrize("options", ["bilm:negatives=0", "bilm:negatives=6"], ids=["full softmax", "sampled softmax"])
def test_another_domain_from_a_checkpoint(monkeypatch: pytest.MonkeyPatch, folder: Path, options: str) -> None:
    """What was learned of one domain serves it, and going on from there on another one's text serves that."""
    tokenizer, general, special = folder / "tokenizer", folder / "general", folder / "special"
    CtxElmoTokenizer.train(TEXT, vocab_size=99, min_count=1).save_pretrained(tokenizer)
    for name, following in (("news", NEWS), ("law", LAW)):
        write(folder / f"{name}.txt", following, 7, 120, seed=0)
    news, law = (batch_of(tokenizer, write(folder / "unseen.txt", each, 7, 30, seed=2), 10) for each in (NEWS, LAW))
    common = {"objective": options, "max_length": 10, "max_steps": STEPS}
    new = {"family": "elmo", "config": folder / "tiny.json"}
    pretrain(monkeypatch, folder, **new, **common, dataset=folder / "news.txt", output_dir=general)
    learned, before = perplexity(general, news), perplexity(general, law)
    assert learned < 2 < 4 < before, "four words are equally frequent, and but for the first nothing is left to chance"
    pretrain(monkeypatch, folder, model=general, **common, dataset=folder / "law.txt", output_dir=special)
    assert perplexity(special, law) < 2


def test_several_languages_by_their_tags(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The two have the same words, and sentences of two words: only the tags say which follows which."""
    tokenizer = folder / "tokenizer"
    CtxElmoTokenizer.train(TEXT, vocab_size=99, min_count=1, languages=["en", "de"]).save_pretrained(tokenizer)
    for name, following in (("news", NEWS), ("law", LAW)):
        write(folder / f"{name}.txt", following, 2, 120, seed=0)
    data = {"dataset": f"{folder / 'news.txt'} {folder / 'law.txt'}", "language_tags": "<en> <de>"}
    alone = {"max_length": 8, "objective": "bilm:carry=false"}  # a row is one sentence
    out = folder / "both"
    new = {"family": "elmo", "config": folder / "tiny.json"}
    pretrain(monkeypatch, folder, **new, **data, **alone, output_dir=out, max_steps=2 * STEPS)
    config = AutoModelForPreTraining.from_pretrained(out).config
    assert (config.num_characters, config.num_languages) == (264, 2)

    unseen = [[each] for text in write(folder / "unseen.txt", NEWS, 2, 30, seed=2) for each in text]
    right, wrong = (batch_of(tokenizer, [[f"{mark} {each}"] for (each,) in unseen], 8) for mark in ("<en>", "<de>"))
    known = perplexity(out, right)
    assert known < 1.7, "but for tags and first words, of two and of four, nothing is left to chance"
    assert perplexity(out, wrong) > 1.5 * known
    # The direction that comes from behind has not read the mark yet: it knows by the words' own first characters.
    tags = right["input_ids"][..., 0]
    assert (tags == 262).sum() == 3 * len(unseen)
    right["input_ids"][..., 0] = tags + (tags == 262)
    assert perplexity(out, right) > 1.2 * known
