"""Texts on which the BPE tokenizers are held against upstream's."""

import random

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
