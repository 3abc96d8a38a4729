"""Texts for comparing BPE tokenizers with transformers."""

import json
import random
from pathlib import Path
from typing import Any

from forked import run_forked

TRICKY = [
    "",
    "Don't stop -- we'll see 3.14% of Café Zoë's naïve résumé!",
    "中文和English混排，日本語のテキスト。한국어 문장입니다.",
    "  leading, trailing and   inner spaces  \n\n\tTab\r\n",
    "a\u0301 e\u0300 \u200b zero\u00adwidth \ufeff \x00 null\u3000wide",
    "🙂👩‍👩‍👧 emoji; математика Ελληνικά עִבְרִית हिन्दी",
]
WORDS = ["boat", "bridge", "garden", "letter", "sailor", "small", "story", "window", "Café", "2,000", "(old)", "it's"]
TEXTS = [" ".join(random.Random(number).choices(WORDS, k=12)) for number in range(200)]


def trained_in_both_orders(tokenizer: Any, size: int, folder: Path) -> tuple[Any, dict[str, int]]:
    """A tokenizer trained on random words, and the vocabulary trained in another process on the reversed texts."""
    rng = random.Random(0)
    texts = [" ".join("".join(rng.choices("abcdefghij", k=rng.randint(1, 7))) for _ in range(200)) for _ in range(20)]
    name = tokenizer.__name__
    program = (
        f"import json, sys; from hf_ctxmodels import {name};"
        f"print(json.dumps({name}.train(json.load(open(sys.argv[1])), {size}).get_vocab()))"
    )
    (folder / "texts.json").write_text(json.dumps(texts[::-1]))
    process = run_forked("-c", program, folder / "texts.json", TOKENIZERS_PARALLELISM="true")
    assert process.returncode == 0, process.stderr
    return tokenizer.train(iter(texts), size), json.loads(process.stdout)
