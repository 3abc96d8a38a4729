"""Texts for comparing tokenizers with transformers."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceTrainer

EDGE_CASE_TEXTS = [
    "",
    "Don't stop -- we'll see 3.14% of Café Zoë's naïve résumé (2,000 pages, £9,50)!",
    "``quotes'' and \"quotes\"  two   spaces a(b)c",
    "中文和English混排，日本語のテキスト。한국어 문장입니다.",
    "  leading, trailing and   inner spaces  \n\n\tTab\r\n",
    "a\u0301 e\u0300 \u200b zero\u00adwidth \ufeff \x00 null\u3000wide",
    "İstanbul ŞEHİR ǅ ﬁne Ⅷ ½ ﷺ",
    "🙂👩‍👩‍👧 emoji; математика Ελληνικά עִבְרִית हिन्दी ▁mark",
]
WORDS = ["boat", "bridge", "garden", "letter", "sailor", "small", "story", "window", "Café", "2,000", "(old)", "it's"]
TEXTS = [" ".join(random.Random(number).choices(WORDS, k=12)) for number in range(200)]


def read_lines(file: Path) -> list[str]:
    """Lines of a compressed text file, except short ones."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [line.strip() for line in lines if len(line) > 20]


def write_bpe_files(folder: Path, model: dict[str, Any]) -> None:
    """Write vocab.json, with ids in the order of `model["vocab"]`, and merges.txt."""
    vocabulary = {token: number for number, token in enumerate(model["vocab"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    lines = ["#version: 0.2", *map(" ".join, model["merges"])]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def train_sentencepiece(path: Path, **options: Any) -> None:
    """Train a model that covers all characters of the texts."""
    options = {"vocab_size": 160, "hard_vocab_limit": False, "character_coverage": 1.0, "minloglevel": 2} | options
    with path.open("wb") as file:
        SentencePieceTrainer.train(
            sentence_iterator=iter([*TEXTS, *EDGE_CASE_TEXTS[1:7]]), model_writer=file, **options
        )


def assert_same_encodings(tokenizer: Any, reference: Any, texts: list[str], **options: Any) -> None:
    """Compare encodings of texts with offsets, and of truncated pairs, and decoded texts."""
    encoded = tokenizer(texts, return_offsets_mapping=True, **options)
    assert encoded.data == reference(texts, return_offsets_mapping=True, **options).data
    pairs = {"text": texts[:-1], "text_pair": texts[1:], "truncation": True, "max_length": 48, **options}
    assert tokenizer(**pairs).data == reference(**pairs).data
    assert [tokenizer.decode(ids) for ids in encoded.input_ids] == [reference.decode(ids) for ids in encoded.input_ids]
