"""Word tokenizer of InferSent."""

from typing import Any

from hf_ctxmodels.tokenizers.word_level import CtxWordTokenizer


class CtxInferSentTokenizer(CtxWordTokenizer):
    """Whole words, see `CtxWordTokenizer`, of one text or two; the second has `token_type_ids` of 1.

    Args:
        bos_token, eos_token: Words of the vocabulary before and after every text, such as "<p>" and "</p>" with the
            released vectors; None for none.
        *args, **kwargs: See `CtxWordTokenizer`.
    """

    model_input_names = ["input_ids", "token_type_ids", "attention_mask"]

    def __init__(self, *args: Any, bos_token: str | None = None, eos_token: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, bos_token=bos_token, eos_token=eos_token, **kwargs)
        bos, eos = "{{bos}}:{0} " if bos_token else "", " {{eos}}:{0}" if eos_token else ""
        first, second = (f"{bos}{text}{eos}".format(number) for number, text in enumerate(("$A:0", "$B:1")))
        self.set_template(first, f"{first} {second}")
