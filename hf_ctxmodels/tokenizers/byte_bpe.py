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
    """GPT-2's byte-level BPE: no character is unknown, and `decode` restores the text exactly.

    GPT-2's pattern splits text into words, numbers and punctuation, each with the space before it; their UTF-8 bytes,
    represented as 256 printable characters, are merged in the order of the merge list.

    The ids equal the ids of transformers' byte-level tokenizers with the same files (`vocab.json` and `merges.txt`, or
    `tokenizer.json`). Unlike these, it raises an error for a missing vocabulary, merge list or special token, and with
    `is_split_into_words` it keeps words separate even without `add_prefix_space`.

    Args:
        vocab: Token -> id, or the path of a `vocab.json`.
        merges: Pairs in the order in which they are merged, or the path of a `merges.txt`.
        errors: Handling of invalid UTF-8 by `decode`, see `bytes.decode`.
        add_prefix_space: Treat a text's first word as if a space preceded it.
        trim_offsets: Exclude the space from a token's offsets.
        **kwargs: Passed on to `TokenizersBackend`: special tokens, `model_max_length`, `padding_side`, ...

    Raises:
        CtxError: The vocabulary or the merges are missing, damaged or of different tokenizers, or a special token is
            missing.
    """

    first_tokens: ClassVar[tuple[str, ...]] = ()
    """Special tokens of a trained vocabulary before the bytes, by id from 0."""

    last_tokens: ClassVar[tuple[str, ...]]
    """Special tokens of a trained vocabulary after the last merge."""

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
        table, pairs, file = self.read_vocabulary_and_merges(vocab, merges, kwargs)
        self._tokenizer = Tokenizer(build_bpe(table, pairs, file, unk_token=str(kwargs["unk_token"])))
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
        self._tokenizer.decoder = decoders.ByteLevel()
        super().__init__(errors=errors, add_prefix_space=add_prefix_space, trim_offsets=trim_offsets, **kwargs)
        self.trim_offsets = trim_offsets
        self._tokenizer.post_processor = self.build_post_processor(add_prefix_space)

    def build_post_processor(self, add_prefix_space: bool) -> processors.PostProcessor:
        """Create the processor that trims offsets; subclasses also add special tokens."""
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
        """Learn merges. The vocabulary does not depend on the order of the texts.

        Args:
            texts: Strings of any length, iterated once.
            vocab_size: Number of tokens including the 256 bytes and special tokens; smaller for a small corpus.
            add_prefix_space: See the class.
            min_frequency: Minimum frequency of a merged pair.
            model_max_length: Maximum input length in tokens, including special tokens.

        Raises:
            CtxError: There is no text, or `vocab_size` is too small for the bytes.
        """
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        minimum = len(cls.first_tokens) + len(alphabet) + len(cls.last_tokens)
        if vocab_size < minimum:
            raise CtxError(
                f"A vocabulary of {vocab_size} tokens is too small for the 256 bytes and "
                f"{minimum - len(alphabet)} special tokens.",
                hint=f"ask for at least {minimum} tokens.",
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
        model_state = json.loads(backend.to_str())["model"]
        vocab = model_state["vocab"] | {token: len(model_state["vocab"]) + n for n, token in enumerate(cls.last_tokens)}
        options: dict[str, Any] = {"add_prefix_space": add_prefix_space, "model_max_length": model_max_length}
        return cls(vocab=vocab, merges=model_state["merges"], **options)
