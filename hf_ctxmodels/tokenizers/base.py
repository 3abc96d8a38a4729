"""The base class of all tokenizers, and checks of tokenizer files and of a tokenizer's fit to a model."""

import hashlib
import json
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary

from tokenizers import AddedToken, processors
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, TokenizersBackend

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.remote_code import InstalledCode, get_remote_code_stub

_NEW_TOKENS = "_new_tokens"  # keyword for the special tokens passed to `from_pretrained`
# Tokenizer -> its length and digest; computing the digest of a large vocabulary takes a second.
_RECOGNISED: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[int, str]] = WeakKeyDictionary()


class CtxTokenizer(InstalledCode, TokenizersBackend):
    """A tokenizer of the `tokenizers` library; damaged files raise a `CtxError`.

    Attributes:
        defaults: Default values of keyword arguments, special tokens among them.
        templates: The special tokens around one text and around a pair, see `set_template`; None for none.
    """

    defaults: ClassVar[dict[str, Any]] = {}
    templates: ClassVar[tuple[str, str] | None] = None
    model_input_names = ["input_ids", "token_type_ids", "attention_mask"]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Make an inherited `__init__` the class's own: transformers passes the vocabulary of tokenizer.json only to
        classes that define `__init__`, and the file to others."""
        super().__init_subclass__(**kwargs)
        cls.__init__ = cls.__init__  # type: ignore[method-assign]

    def __init__(self, **kwargs: Any) -> None:
        kwargs.pop("auto_map", None)  # of the directory it was read from; what is saved gets that of this class
        kwargs.pop(_NEW_TOKENS, None)
        super().__init__(**kwargs)
        if self.templates is not None:
            self.set_template(*self.templates)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | PathLike[str], *inputs: Any, **kwargs: Any) -> Self:
        """Open a directory or Hub id; a damaged file raises a `CtxError`.

        A special token passed here (`pad_token="[PAD]"`) that the vocabulary lacks is added to it, except `unk_token`,
        which the tokenization model itself defines.
        """
        named = set(cls.SPECIAL_TOKENS_ATTRIBUTES) - {"unk_token"}
        if new := [str(value) for name, value in kwargs.items() if name in named and value is not None]:
            kwargs[_NEW_TOKENS] = new
        try:
            return super().from_pretrained(pretrained_model_name_or_path, *inputs, **kwargs)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise CtxError(
                f"tokenizer.json or tokenizer_config.json is damaged; it is not the JSON that was saved: {error}.",
                location=str(pretrained_model_name_or_path),
                hint="copy the files again from their source, or train the tokenizer again.",
            ) from error

    def prepare_for_tasks(self) -> None:
        """Add the special tokens that the inputs of downstream tasks have, and those of pretraining have not: for
        families with such. Fine-tuning calls it; the model needs embeddings of what is new."""

    @property
    def _auto_map(self) -> dict[str, list[str | None]] | None:
        """What `save_pretrained` of transformers writes as `auto_map`."""
        stub = get_remote_code_stub(self)
        return None if stub is None else stub.tokenizer_auto_map

    def save_pretrained(self, save_directory: str | PathLike[str], *args: Any, **kwargs: Any) -> tuple[str, ...]:
        """Save the tokenizer, with the stub by which `trust_remote_code=True` opens the directory (`core.remote_code`)."""
        if (stub := get_remote_code_stub(self)) is not None:
            stub.write(save_directory)
        return super().save_pretrained(save_directory, *args, **kwargs)

    def set_template(self, single: str, pair: str) -> None:
        """Set the special tokens around texts, as "token:segment": "{cls}:0 $A:0 {sep}:0". Those that are None are left
        out.

        Args:
            single: For one text, `$A`.
            pair: For two texts, `$A` and `$B`.
        """
        names = {name.removesuffix("_token"): str(token) for name, token in self.special_tokens_map.items()}
        used = [token for name, token in names.items() if f"{{{name}}}" in single + pair]
        single, pair = (
            " ".join(
                part.format(**names) for part in template.split() if part[0] == "$" or part[1:].split("}")[0] in names
            )
            for template in (single, pair)
        )
        self._tokenizer.post_processor = processors.TemplateProcessing(
            single=single,
            pair=pair,
            special_tokens=[(token, self.convert_tokens_to_ids(token)) for token in used],
        )


def make_mask_token(token: str | AddedToken) -> AddedToken:
    """A mask token that absorbs the space before it, as a word does; an `AddedToken` is returned unchanged."""
    return token if isinstance(token, AddedToken) else AddedToken(token, lstrip=True, special=True)


def get_special_tokens(kwargs: dict[str, Any], names: Iterable[str]) -> list[str]:
    """The special tokens of these names among a tokenizer's arguments, without those that are None."""
    return [str(kwargs[name]) for name in names if kwargs.get(name) is not None]


def check_special_tokens(
    vocab: list[str] | dict[str, int], tokens: list[str], kwargs: dict[str, Any], file: str | None
) -> None:
    """Raise a `CtxError` when one of the special `tokens` is not in the vocabulary, nor added to it, nor to be added.

    Args:
        vocab: The vocabulary.
        tokens: The special tokens the tokenizer cannot work without.
        kwargs: The tokenizer's arguments; `added_tokens_decoder` holds tokens that were added to the vocabulary, and
            what the caller of `from_pretrained` gave will be.
        file: The file of the vocabulary, for the message.
    """
    known = {*vocab, *map(str, kwargs.get("added_tokens_decoder", {}).values()), *kwargs.get(_NEW_TOKENS, ())}
    missing = [token for token in tokens if token not in known]
    if missing:
        raise CtxError(
            f"The vocabulary of {len(vocab)} tokens lacks {', '.join(missing)}: it is damaged or another family's.",
            location=file,
            hint="copy it again; tokens of other names are given as pad_token=, unk_token=, cls_token=, ...",
        )


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase, size: int | None = None) -> str:
    """Identify a tokenizer's vocabulary: "<size>:<SHA-256 of its tokens and their ids>".

    Args:
        size: Number of tokens to read, from the lowest id on; None for all. Tokens added later have higher ids.
    """
    numbered = sorted((number, token) for token, number in tokenizer.get_vocab().items())[:size]
    lines = "".join(f"{number}\t{token}\n" for number, token in numbered)
    return f"{len(numbered)}:{hashlib.sha256(lines.encode(errors='surrogatepass')).hexdigest()}"


def record_tokenizer_digest(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the tokenizer's digest to a model's configuration; `check_tokenizer_matches_model` compares later tokenizers with it."""
    config.tokenizer_digest = tokenizer_digest(tokenizer)  # type: ignore[attr-defined]


def _check_vocabulary(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, location: str) -> None:
    digest = getattr(config, "tokenizer_digest", None)
    if digest is None:
        return
    state = (len(tokenizer), digest)
    if _RECOGNISED.get(tokenizer) == state:
        return
    size = digest.partition(":")[0]
    if not size.isdecimal() or tokenizer_digest(tokenizer, int(size)) != digest:
        raise CtxError(
            f"This is not the tokenizer that the model was trained with: the {size} tokens of that one had other names "
            "or ids.",
            location=location,
            hint="put the files of that tokenizer there. To use this one all the same, give --config_options "
            "tokenizer_digest=null where a script takes it, or delete tokenizer_digest from the model's config.json.",
        )
    _RECOGNISED[tokenizer] = state


def check_tokenizer_matches_model(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, max_length: int = 0, *, location: str
) -> None:
    """Check that tokenizer, model and input length (0 for none) fit together.

    Raises:
        CtxError: The tokenizer has more tokens than the model has embeddings or is not the one that the model was
            trained with, or inputs are longer than its positions or too short for any text.
    """
    vocabulary = getattr(config, "vocab_size", None)
    if vocabulary is not None and len(tokenizer) > vocabulary:
        raise CtxError(
            f"The vocabulary does not fit the model: the tokenizer has {len(tokenizer)} tokens, the model embeds "
            f"{vocabulary} (vocab_size).",
            location=location,
            hint="use the tokenizer the model was trained with, a configuration with a larger vocab_size, or add "
            "embeddings: model.resize_token_embeddings(len(tokenizer)).",
        )
    _check_vocabulary(tokenizer, config, location)
    check_max_length(tokenizer, max_length)
    limit = getattr(config, "max_sequence_length", None)
    if limit is not None and limit < max_length:
        raise CtxError(
            f"Inputs of {max_length} tokens are over the model's limit of {limit} positions (max_position_embeddings).",
            location=f"--max_length {max_length}",
            hint=f"use --max_length {limit} or less, or a configuration with more positions.",
        )


def check_max_length(tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
    """Raise CtxError if inputs of this length (0 for any) are too short for any text."""
    special = tokenizer.num_special_tokens_to_add()
    if 0 < max_length <= special:
        raise CtxError(
            f"Inputs of {max_length} tokens leave no room for text beside the {special} special tokens.",
            location=f"--max_length {max_length}",
            hint=f"use --max_length {special + 1} or more.",
        )


def missing_vocabulary_error(cls: type, kwargs: dict[str, Any]) -> CtxError:
    """The error for a directory without tokenizer files, or a call without a vocabulary."""
    files = " nor ".join(sorted(cls.vocab_files_names.values(), reverse=True))  # type: ignore[attr-defined]
    return CtxError(
        f"A tokenizer without a vocabulary: neither {files} is there.",
        location=kwargs.get("name_or_path") or None,
        hint=f"copy one of them there, or make one: `hf-ctxmodels train-tokenizer`, or {cls.__name__}.train.",
    )


def empty_text_error() -> CtxError:
    """The error for an empty training text."""
    return CtxError("No text to learn a vocabulary from: it is empty or white space only.", hint="check the texts.")


def read_text(path: str) -> str:
    """The content of a UTF-8 file; raises CtxError if it cannot be read, or is not UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise CtxError(f"The file cannot be read: {error.strerror}.", location=path, hint="check it.") from error
    except UnicodeDecodeError as error:
        raise CtxError(
            f"The file is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}.",
            location=path,
            hint="copy it again from its source.",
        ) from error
