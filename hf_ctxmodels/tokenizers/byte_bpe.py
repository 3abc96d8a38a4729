"""Byte-level byte-pair encoding (Radford et al. 2019, section 2.2; Sennrich et al. 2016 for the merges)."""

import json
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Self

from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import BatchEncoding

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.tokenizers.base import CtxTokenizer, no_text, no_vocabulary, read_text, require_tokens

Merges = list[tuple[str, str]]


class CtxByteBPETokenizer(CtxTokenizer):
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

    vocab_files_names = {"vocab_file": "vocab.json", "merges_file": "merges.txt", "tokenizer_file": "tokenizer.json"}
    model_input_names = ["input_ids", "attention_mask"]
    model = BPE

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
        if "tokenizer_object" in kwargs:  # how `train_new_from_iterator` builds its result
            learned = json.loads(kwargs["tokenizer_object"].to_str())["model"]
            vocab, merges = learned["vocab"], learned["merges"]
        kwargs.pop("tokenizer_file", None)  # already read
        file = vocab if isinstance(vocab, str) else kwargs.get("name_or_path") or None
        table, pairs = _read(type(self), vocab, merges, kwargs)
        table = self.own_vocabulary(table)
        named = [str(token) for name, token in kwargs.items() if name.endswith("_token") and token is not None]
        require_tokens(table, named, kwargs, file)
        self._tokenizer = _build_backend(table, pairs, str(kwargs["unk_token"]), add_prefix_space, file)
        super().__init__(errors=errors, add_prefix_space=add_prefix_space, trim_offsets=trim_offsets, **kwargs)
        self.trim_offsets = trim_offsets
        self._tokenizer.post_processor = self.build_post_processor(add_prefix_space)

    @classmethod
    def own_vocabulary(cls, vocab: dict[str, int]) -> dict[str, int]:
        """This tokenizer's ids for those of a file; a family may open another's files."""
        return vocab

    def build_post_processor(self, add_prefix_space: bool) -> processors.PostProcessor:
        """The processor that adds special tokens and trims offsets; the base only trims."""
        return processors.ByteLevel(trim_offsets=self.trim_offsets, add_prefix_space=add_prefix_space)

    @classmethod
    def convert_to_native_format(cls, trust_remote_code: bool = False, **kwargs: Any) -> dict[str, Any]:
        """The arguments of `__init__`, from the files. Never runs code of a repository, and never guesses merges from
        a vocabulary, as transformers does."""
        if kwargs.get("tokenizer_file") is not None:
            return super().convert_to_native_format(**kwargs)
        files = {"vocab": kwargs.get("vocab_file"), "merges": kwargs.get("merges_file")}
        return {**kwargs, **{name: path for name, path in files.items() if kwargs.get(name) is None}}

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
        backend.train_from_iterator(_some_text(texts), trainer)
        learned = json.loads(backend.to_str())["model"]
        vocab = learned["vocab"] | {token: len(learned["vocab"]) + n for n, token in enumerate(cls.last_tokens)}
        options: dict[str, Any] = {"add_prefix_space": add_prefix_space, "model_max_length": model_max_length}
        return cls(vocab=vocab, merges=learned["merges"], **options)


def _some_text(texts: Iterable[str]) -> Iterator[str]:
    """The texts; raises in the end if none of them has a character that is no white space."""
    found = False
    for text in texts:
        found = found or bool(text.strip())
        yield text
    if not found:
        raise no_text()


def _build_backend(
    vocab: dict[str, int], merges: Merges, unk_token: str, add_prefix_space: bool, file: str | None
) -> Tokenizer:
    """The `tokenizers` pipeline without its post-processor, which needs the ids of the special tokens."""
    try:
        backend = Tokenizer(BPE(vocab, merges, unk_token=unk_token, fuse_unk=False))
    except Exception as error:  # the library raises no narrower one
        raise CtxError(
            f"The merges do not belong to the vocabulary: {error}.",
            location=file,
            hint="copy vocab.json and merges.txt (or tokenizer.json) of one tokenizer again.",
        ) from error
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    return backend


def _read(
    cls: type, vocab: str | dict[str, int] | None, merges: str | list[Any] | None, kwargs: dict[str, Any]
) -> tuple[dict[str, int], Merges]:
    """Vocabulary and merges, given as they are or as paths."""
    if not vocab:
        raise no_vocabulary(cls, kwargs)
    if merges is None:
        raise CtxError(
            "The vocabulary has no merges: text would be split into single bytes.",
            location=vocab if isinstance(vocab, str) else kwargs.get("name_or_path") or None,
            hint="put merges.txt beside vocab.json, or use the tokenizer.json, which holds both.",
        )
    table = _read_vocabulary(vocab) if isinstance(vocab, str) else vocab
    pairs = _read_merges(merges) if isinstance(merges, str) else merges
    split = (pair.split(" ") if isinstance(pair, str) else pair for pair in pairs)
    return table, [(left, right) for left, right in split]


def _read_vocabulary(path: str) -> dict[str, int]:
    """Token -> id of a `vocab.json`."""
    try:
        vocab = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise CtxError(f"vocab.json is damaged: {error}.", location=path, hint="copy it again.") from error
    if not isinstance(vocab, dict) or not all(isinstance(index, int) for index in vocab.values()):
        raise CtxError("vocab.json does not map tokens to ids.", location=path, hint="copy it again from its source.")
    return vocab


def _read_merges(path: str) -> list[str]:
    """Lines of a `merges.txt`, without the version and empty lines."""
    lines = [line for line in read_text(path).split("\n") if line and not line.startswith("#version")]
    for line in lines:
        if line.count(" ") != 1:
            raise CtxError(f"merges.txt holds {line!r}, which is not two tokens.", location=path, hint="copy it again.")
    return lines
