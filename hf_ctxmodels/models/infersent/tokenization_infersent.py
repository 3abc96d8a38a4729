"""Word tokenizer of InferSent."""

from hf_ctxmodels.tokenizers.word_level import CtxWordTokenizer


class CtxInferSentTokenizer(CtxWordTokenizer):
    """Word-level tokenizer for one text or two, see `CtxWordTokenizer`; the second text has `token_type_ids` of 1.

    The optional `bos_token` and `eos_token`, such as "<p>" and "</p>" with the released vectors, surround every text.
    """

    model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    templates = ("{bos}:0 $A:0 {eos}:0", "{bos}:0 $A:0 {eos}:0 {bos}:1 $B:1 {eos}:1")
