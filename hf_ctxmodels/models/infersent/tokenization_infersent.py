"""Word tokenizer of InferSent."""

from collections.abc import Sequence
from typing import Any

from hf_ctxmodels.tokenizers.words import CtxWordTokenizer


class CtxInferSentTokenizer(CtxWordTokenizer):
    """Whole words, see `CtxWordTokenizer`, of one text or two; the second has `token_type_ids` of 1.

    Args:
        bos_token, eos_token: Words of the vocabulary that stand before and behind every text, as "<p>" and "</p>" do
            with the released vectors; None for none.
        vocab, counts, kwargs: See `CtxWordTokenizer`.
    """

    model_input_names = ["input_ids", "token_type_ids", "attention_mask"]

    def __init__(
        self,
        vocab: dict[str, int] | None = None,
        counts: Sequence[int] | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(vocab=vocab, counts=counts, bos_token=bos_token, eos_token=eos_token, **kwargs)
        first, second = (
            " ".join(
                part
                for part, used in ((f"{{bos}}:{number}", bos_token), (text, True), (f"{{eos}}:{number}", eos_token))
                if used
            )
            for number, text in enumerate(("$A:0", "$B:1"))
        )
        self.set_template(first, f"{first} {second}")
