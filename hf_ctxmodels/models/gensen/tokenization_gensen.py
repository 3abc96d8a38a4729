"""GenSen tokenizer: LASER's, of one text or two."""

from hf_ctxmodels.models.laser.tokenization_laser import CtxLaserTokenizer


class CtxGenSenTokenizer(CtxLaserTokenizer):
    """Subwords of all that is read and written, see `CtxLaserTokenizer`; a second text has `token_type_ids` of 1."""

    model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
