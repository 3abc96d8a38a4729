"""GenSen tokenizer: joint byte-pair encodings of one text or two."""

from hf_ctxmodels.tokenizers.subwords import SubwordTokenizer


class CtxGenSenTokenizer(SubwordTokenizer):
    """Subwords of all that is read and written, see `SubwordTokenizer`; a second text has `token_type_ids` of 1."""

    model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
