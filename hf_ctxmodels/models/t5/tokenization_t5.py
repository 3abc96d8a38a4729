"""SentencePiece tokenizer of T5 (Raffel et al. 2020, section 3.1.3) with the sentinels of its objective (figure 2)."""

from collections.abc import Sequence
from typing import Any, ClassVar

from tokenizers import AddedToken

from hf_ctxmodels.core.constants import SENTINEL_TOKEN
from hf_ctxmodels.tokenizers.unigram import CtxUnigramTokenizer, Pieces, read_sentencepiece

NUM_SENTINELS = 100


class CtxT5Tokenizer(CtxUnigramTokenizer):
    """Tokenizer of T5: cased SentencePiece unigram, A </s>, pairs A </s> B </s>, and a hundred sentinel tokens.

    Produces the same ids as `transformers.T5Tokenizer` on the same files (`spiece.model` or `tokenizer.json`): <pad> 0,
    </s> 1, <unk> 2, then the other tokens, then the sentinels in reverse order, so that <extra_id_0> has the highest
    id. The models' `vocab_size` is a multiple of 128 (32128 for 32100 tokens). The sentinels are also the last tokens
    of a newly trained vocabulary and count towards its size. See `CtxUnigramTokenizer` for training and errors.

    Args:
        vocab: (token, log probability) in the order of the ids.
        extra_special_tokens, additional_special_tokens: Additional special tokens (the latter is the former name); the
            sentinels of the vocabulary are always included.
        **kwargs: See `CtxUnigramTokenizer`.

    Example:
        >>> tokenizer = CtxT5Tokenizer.train(["A cat sat on a mat.", "A cat ran."], vocab_size=130)
        >>> tokenizer.decode(tokenizer("A cat <extra_id_0> mat.").input_ids)
        'A cat<extra_id_0> mat.</s>'
    """

    model_input_names = ["input_ids", "attention_mask"]
    first_tokens = ("<pad>", "</s>", "<unk>")
    templates = ("$A:0 {eos}:0", "$A:0 {eos}:0 $B:0 {eos}:0")
    normalizes_quotes = False

    defaults: ClassVar[dict[str, Any]] = {
        "do_lower_case": False,
        "keep_accents": True,
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
    }

    def __init__(
        self,
        vocab: Pieces | None = None,
        *,
        extra_special_tokens: Sequence[str | AddedToken] | None = None,
        additional_special_tokens: Sequence[str | AddedToken] | None = None,
        **kwargs: Any,
    ) -> None:
        extra = list(extra_special_tokens or additional_special_tokens or ())
        pieces, number = {piece for piece, _ in vocab or ()}, 0
        while (token := SENTINEL_TOKEN.format(number)) in pieces:
            extra += [token] if token not in map(str, extra) else []
            number += 1
        super().__init__(vocab, extra_special_tokens=extra, **kwargs)

    @classmethod
    def convert_to_native_format(cls, trust_remote_code: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Arguments of `__init__` from files; `extra_ids` sentinels are appended to a SentencePiece model (100 by
        default, none for mT5)."""
        arguments = super().convert_to_native_format(**kwargs)
        number = arguments.pop("extra_ids", None)
        if kwargs.get("tokenizer_file") is None and number not in (None, NUM_SENTINELS) and arguments.get("vocab"):
            pieces = read_sentencepiece(kwargs["vocab_file"], lambda pieces: pieces)["vocab"]
            arguments["vocab"] = _append_sentinels(pieces, number)
        return arguments

    @classmethod
    def reorder_vocabulary(cls, pieces: Pieces) -> Pieces:
        """Append the sentinels in reverse order, unless the vocabulary has them."""
        return _append_sentinels(pieces, NUM_SENTINELS)


def _append_sentinels(pieces: Pieces, number: int) -> Pieces:
    if any(piece == SENTINEL_TOKEN.format(0) for piece, _ in pieces):
        return pieces
    return [*pieces, *((SENTINEL_TOKEN.format(index), 0.0) for index in reversed(range(number)))]
