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
from hf_ctxmodels.objectives.bidirectional_lm import BidirectionalLM


def pretrain(folder: Path, **flags: object) -> None:
    common = {"tokenizer": folder / "tokenizer", "per_device_batch_size": 16, "learning_rate": 3e-2}
    assert run_command("pretrain", **common, warmup_steps=0.1, dataloader_workers=0, save_steps=0, **flags) == 0


def write(file: Path, following: dict[str, str], words: int, documents: int, seed: int) -> list[list[str]]:
    """Documents of three sentences; the first word of a sentence determines the others."""
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
STEPS = 200
LAW = {next_: word for word, next_ in NEWS.items()}  # the same words in the reverse order
TEXT = ["a b c d A B C D ."]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fields = {name: value for name, value in TINY.items() if name in CtxElmoConfig.__dataclass_fields__}
    fields |= {"num_characters": 262, "num_hidden_layers": 1, "max_characters_per_token": 50}
    fields |= {"character_embedding_size": 16, "filters": [[1, 32], [2, 32]]}  # learns words quickly
    (tmp_path / "tiny.json").write_text(json.dumps(fields))
    return tmp_path


def batch_of(tokenizer: Path, documents: list[list[str]], max_length: int) -> dict[str, Tensor]:
    objective = BidirectionalLM(AutoTokenizer.from_pretrained(tokenizer), max_length=max_length, seed=0)
    return objective.collate(list(objective.examples(documents)))


@torch.no_grad()
def perplexity(model: Path, batch: dict[str, Tensor]) -> float:
    """Over the whole vocabulary."""
    return math.exp(AutoModelForPreTraining.from_pretrained(model).eval()(**batch).loss)


def test_another_domain(folder: Path) -> None:
    """A model of one domain, trained with a sampled softmax, is continued on the text of another with a full one."""
    tokenizer, general, special = folder / "tokenizer", folder / "general", folder / "special"
    CtxElmoTokenizer.train(TEXT, vocab_size=99, min_count=1).save_pretrained(tokenizer)
    for name, following in (("news", NEWS), ("law", LAW)):
        write(folder / f"{name}.txt", following, 7, 120, seed=0)
    news, law = (
        batch_of(tokenizer, write(folder / "unseen.txt", following, 7, 30, seed=2), 10) for following in (NEWS, LAW)
    )
    common = {"max_length": 10, "max_steps": STEPS}
    new = {"family": "elmo", "config": folder / "tiny.json"}
    pretrain(folder, **new, **common, objective="bilm:negatives=6", dataset=folder / "news.txt", output_dir=general)
    learned, before = perplexity(general, news), perplexity(general, law)
    assert learned < 2 < 4 < before, "four equally frequent words, of which only the first of a sentence is random"
    full = {**common, "objective": "bilm:negatives=0"}
    pretrain(folder, model=general, **full, dataset=folder / "law.txt", output_dir=special)
    assert perplexity(special, law) < 2


def test_language_tags(folder: Path) -> None:
    """Both languages have the same words: only the tags determine which word follows."""
    tokenizer = folder / "tokenizer"
    CtxElmoTokenizer.train(TEXT, vocab_size=99, min_count=1, languages=["en", "de"]).save_pretrained(tokenizer)
    for name, following in (("news", NEWS), ("law", LAW)):
        write(folder / f"{name}.txt", following, 2, 120, seed=0)
    data = {"dataset": [folder / "news.txt", folder / "law.txt"], "language_tags": ["<en>", "<de>"]}
    alone = {"max_length": 8, "objective": "bilm:carry=false"}  # an example is one sentence
    out = folder / "both"
    new = {"family": "elmo", "config": folder / "tiny.json"}
    pretrain(folder, **new, **data, **alone, output_dir=out, max_steps=350)
    config = AutoModelForPreTraining.from_pretrained(out).config
    assert (config.num_characters, config.num_languages) == (264, 2)

    unseen = [[sentence] for text in write(folder / "unseen.txt", NEWS, 2, 30, seed=2) for sentence in text]
    right, wrong = (
        batch_of(tokenizer, [[f"{tag} {sentence}"] for (sentence,) in unseen], 8) for tag in ("<en>", "<de>")
    )
    correct = perplexity(out, right)
    assert correct < 1.7, "only tags (2) and first words (4) are random"
    assert perplexity(out, wrong) > 1.5 * correct
    # the backward direction knows the language by the first characters of the words, not by the tag
    tags = right["input_ids"][..., 0]
    assert (tags == 262).sum() == 3 * len(unseen)
    right["input_ids"][..., 0] = tags + (tags == 262)
    assert perplexity(out, right) > 1.2 * correct
