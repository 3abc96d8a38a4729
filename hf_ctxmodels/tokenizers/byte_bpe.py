"""Byte-level byte-pair encoding (Radford et al. 2019, section 2.2; Sennrich et al. 2016 for the merges)."""

import json
from collections.abc import Iterable
from typing import Any, ClassVar, Self

from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import BatchEncoding

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.tokenizers.bpe import BPETokenizer, build_bpe, require_text


class CtxByteBPETokenizer(BPETokenizer):
    """GPT-2's byte-level BPE: no character is unknown, and `decode` returns the text byte by byte.

    Text is split by GPT-2's pattern into words, numbers and punctuation, each with the space before it; their UTF-8
    bytes, written as 256 printable characters, are merged in the order of the merge list.

    Gives the ids of the byte-level tokenizers of transformers on the same files (`vocab.json` with `merges.txt`, or
    `tokenizer.json`). Unlike them it raises an error for a missing vocabulary, merge list or special token, and with
    `is_split_into_words` it keeps the given words apart without `add_prefix_space`.

    Args:
        vocab: Token -> id, or the path of a `vocab.json`.
        merges: Pairs in the order in which they are merged, or the path of a `merges.txt`.
        errors: How `decode` handles invalid UTF-8, see `bytes.decode`.
        add_prefix_space: Treat a text's first word as if a space preceded it.
        trim_offsets: Exclude the space from a token's offsets.
        **kwargs: Passed on to `TokenizersBackend`: special tokens, `model_max_length`, `padding_side`, ...

    Raises:
        CtxError: The vocabulary or the merges are missing, damaged or of different tokenizers, or a special token is
            missing.
    """

    first_tokens: ClassVar[tuple[str, ...]] = ()
    """The special tokens of a newly trained vocabulary before the bytes, in the order of their ids from 0 on."""

    last_tokens: ClassVar[tuple[str, ...]]
    """The special tokens after the last merge."""

    def __init__(
        self,
        vocab: str | dict[str, int] | None = None,
        merges: str | list[Any] | None = None,
        errors: str = "replace",
        add_prefix_space: bool = False,
        trim_offsets: bool = True,
        **kwargs: Any,
    ) -> None:
        kwargs = {**self.defaults, **kwargs}
        table, pairs, file = self.read(vocab, merges, kwargs)
        self._tokenizer = Tokenizer(build_bpe(table, pairs, file, unk_token=str(kwargs["unk_token"])))
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
        self._tokenizer.decoder = decoders.ByteLevel()
        super().__init__(errors=errors, add_prefix_space=add_prefix_space, trim_offsets=trim_offsets, **kwargs)
        self.trim_offsets = trim_offsets
        self._tokenizer.post_processor = self.build_post_processor(add_prefix_space)

    def build_post_processor(self, add_prefix_space: bool) -> processors.PostProcessor:
        """The processor that adds special tokens and trims offsets; the base only trims."""
        return processors.ByteLevel(trim_offsets=self.trim_offsets, add_prefix_space=add_prefix_space)

    def _encode_plus(self, *args: Any, is_split_into_words: bool = False, **kwargs: Any) -> BatchEncoding:
        if not is_split_into_words or self.add_prefix_space:
            return super()._encode_plus(*args, is_split_into_words=is_split_into_words, **kwargs)
        backend = self._tokenizer
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        backend.post_processor = self.build_post_processor(add_prefix_space=True)
        try:
            return super()._encode_plus(*args, is_split_into_words=True, **kwargs)
        finally:
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            backend.post_processor = self.build_post_processor(add_prefix_space=False)

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        *,
        add_prefix_space: bool = False,
        min_frequency: int = 2,
        model_max_length: int = 512,
    ) -> Self:
        """Learn merges. The same texts, in whatever order, give the same vocabulary.

        Args:
            texts: Strings of any length; read once.
            vocab_size: Number of tokens, the 256 bytes and the special ones included; a small corpus may give fewer.
            add_prefix_space: See the class.
            min_frequency: A pair seen fewer times is not merged.
            model_max_length: Longest input of the model in tokens, special tokens included.

        Raises:
            CtxError: There is no text, or `vocab_size` is too small for the bytes.
        """
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        needed = len(cls.first_tokens) + len(alphabet) + len(cls.last_tokens)
        if vocab_size < needed:
            raise CtxError(
                f"A vocabulary of {vocab_size} tokens cannot hold the 256 bytes and {needed - len(alphabet)} special "
                "tokens.",
                hint=f"ask for at least {needed} tokens.",
            )
        backend = Tokenizer(BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - len(cls.last_tokens),
            min_frequency=min_frequency,
            special_tokens=list(cls.first_tokens),
            initial_alphabet=alphabet,
            show_progress=False,
        )
        backend.train_from_iterator(require_text(texts), trainer)
        learned = json.loads(backend.to_str())["model"]
        vocab = learned["vocab"] | {token: len(learned["vocab"]) + n for n, token in enumerate(cls.last_tokens)}
        options: dict[str, Any] = {"add_prefix_space": add_prefix_space, "model_max_length": model_max_length}
        return cls(vocab=vocab, merges=learned["merges"], **options)
