"""Base class of byte-pair encodings (Sennrich et al. 2016, arXiv 1508.07909) with `vocab.json` and `merges.txt`."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from tokenizers.models import BPE

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.tokenizers.base import (
    CtxTokenizer,
    check_special_tokens,
    empty_text_error,
    get_special_tokens,
    missing_vocabulary_error,
    read_text,
)

Merges = list[tuple[str, str]]


class BPETokenizer(CtxTokenizer):
    """A tokenizer whose files are a vocabulary and a list of merges, or a `tokenizer.json`."""

    vocab_files_names = {"vocab_file": "vocab.json", "merges_file": "merges.txt", "tokenizer_file": "tokenizer.json"}
    model_input_names = ["input_ids", "attention_mask"]
    model = BPE

    @classmethod
    def convert_to_native_format(cls, trust_remote_code: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Arguments of `__init__` from files. Unlike transformers, it never runs code of a repository, and never
        derives merges from a vocabulary."""
        if kwargs.get("tokenizer_file") is not None:
            return super().convert_to_native_format(**kwargs)
        files = {"vocab": kwargs.get("vocab_file"), "merges": kwargs.get("merges_file")}
        return {**kwargs, **{name: path for name, path in files.items() if kwargs.get(name) is None}}

    @classmethod
    def remap_vocabulary(cls, vocab: dict[str, int]) -> dict[str, int]:
        """Map a file's ids to this tokenizer's, for families that load the files of another tokenizer."""
        return vocab

    @classmethod
    def read_vocabulary_and_merges(
        cls, vocab: str | dict[str, int] | None, merges: str | list[Any] | None, kwargs: dict[str, Any]
    ) -> tuple[dict[str, int], Merges, str | None]:
        """Vocabulary, merges and the vocabulary's file from the arguments of `__init__`.

        Args:
            vocab: Token -> id, or the path of a `vocab.json`.
            merges: Pairs in the order in which they are merged, or the path of a `merges.txt`.
            kwargs: The remaining arguments; `tokenizer_file` is removed.

        Raises:
            CtxError: A file is missing or damaged, or a special token of `kwargs` is not in the vocabulary.
        """
        if "tokenizer_object" in kwargs:  # how `train_new_from_iterator` builds its result
            model_state = json.loads(kwargs["tokenizer_object"].to_str())["model"]
            vocab, merges = model_state["vocab"], model_state["merges"]
        kwargs.pop("tokenizer_file", None)  # already read
        file = vocab if isinstance(vocab, str) else kwargs.get("name_or_path") or None
        table, pairs = _read(cls, vocab, merges, kwargs)
        table = cls.remap_vocabulary(table)
        check_special_tokens(table, get_special_tokens(kwargs, cls.SPECIAL_TOKENS_ATTRIBUTES), kwargs, file)
        return table, pairs, file


def build_bpe(vocab: dict[str, int], merges: Merges, file: str | None, **options: Any) -> BPE:
    """Create a BPE model.

    Args:
        vocab: Token -> id.
        merges: Pairs.
        file: File of the vocabulary, for the message.
        options: Arguments of `tokenizers.models.BPE`.

    Raises:
        CtxError: The merges do not belong to the vocabulary.
    """
    try:
        return BPE(vocab, merges, fuse_unk=False, **options)
    except Exception as error:  # the library raises no subclass
        raise CtxError(
            f"The merges do not belong to the vocabulary: {error}.",
            location=file,
            hint="copy vocab.json and merges.txt (or tokenizer.json) of the same tokenizer.",
        ) from error


def require_text(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts; afterwards, raise CtxError if all are white space."""
    has_text = False
    for text in texts:
        has_text = has_text or bool(text.strip())
        yield text
    if not has_text:
        raise empty_text_error()


def _read(
    cls: type, vocab: str | dict[str, int] | None, merges: str | list[Any] | None, kwargs: dict[str, Any]
) -> tuple[dict[str, int], Merges]:
    """Vocabulary and merges from values or paths."""
    if not vocab:
        raise missing_vocabulary_error(cls, kwargs)
    if merges is None:
        raise CtxError(
            "The merges are missing: text would be split into single bytes.",
            location=vocab if isinstance(vocab, str) else kwargs.get("name_or_path") or None,
            hint="copy merges.txt to the directory of vocab.json, or use tokenizer.json, which contains both.",
        )
    table = _read_vocabulary(vocab) if isinstance(vocab, str) else vocab
    pairs = _read_merges(merges) if isinstance(merges, str) else merges
    split = (pair.split(" ") if isinstance(pair, str) else pair for pair in pairs)
    return table, [(first, second) for first, second in split]


def _read_vocabulary(path: str) -> dict[str, int]:
    """Token -> id from a `vocab.json`."""
    try:
        vocab = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise CtxError(f"vocab.json is damaged: {error}.", location=path, hint="copy it again.") from error
    if not isinstance(vocab, dict) or not all(isinstance(index, int) for index in vocab.values()):
        raise CtxError("vocab.json does not map tokens to ids.", location=path, hint="copy it again from its source.")
    return vocab


def _read_merges(path: str) -> list[str]:
    """Lines of a `merges.txt` without the version and empty lines."""
    lines = [line for line in read_text(path).split("\n") if line and not line.startswith("#version")]
    for line in lines:
        if line.count(" ") != 1:
            raise CtxError(
                f"merges.txt has the line {line!r}, which is not two tokens.", location=path, hint="copy it again."
            )
    return lines
