"""Base class of all tokenizers, and checks of tokenizer files and of tokenizers against models."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary

from tokenizers import AddedToken, processors
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, TokenizersBackend
from transformers.utils import logging

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.loading import read_json
from hf_ctxmodels.core.output_files import write_text_file
from hf_ctxmodels.core.remote_code import InstalledCode, get_remote_code_stub

_NEW_TOKENS = "_new_tokens"  # keyword for the special tokens passed to `from_pretrained`
# Classes of transformers with other tokens or ids than this package's classes, on files with the same names
_OTHER_CLASSES = {
    *("BarthezTokenizer", "BertJapaneseTokenizer", "BertweetTokenizer", "BigBirdTokenizer", "ByT5Tokenizer"),
    *("CamembertTokenizer", "FlaubertTokenizer", "HerbertTokenizer", "M2M100Tokenizer", "MBartTokenizer"),
    *("MBart50Tokenizer", "NllbTokenizer", "PegasusTokenizer", "PhobertTokenizer"),
}
logger = logging.get_logger(__name__)

# Tokenizer -> its checked length and digest, since the digest of a large vocabulary takes a second.
_CHECKED: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[int, str]] = WeakKeyDictionary()


class CtxTokenizer(InstalledCode, TokenizersBackend):
    """A tokenizer of the `tokenizers` library; damaged files raise a `CtxError`.

    Attributes:
        defaults: Default values of keyword arguments, including special tokens.
        reads_unchanged_text: Whether the tokenizer of the `tokenizers` library encodes texts without preparation;
            False if `_encode_plus` changes them.
        templates: Templates with special tokens for one text and for a pair, see `set_template`; None for no special
            tokens.
    """

    defaults: ClassVar[dict[str, Any]] = {}
    templates: ClassVar[tuple[str, str] | None] = None
    reads_unchanged_text: bool = True
    model_input_names = ["input_ids", "token_type_ids", "attention_mask"]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Define `__init__` in every subclass: transformers passes the vocabulary of tokenizer.json only to these."""
        super().__init_subclass__(**kwargs)
        cls.__init__ = cls.__init__  # type: ignore[method-assign]

    def __init__(self, **kwargs: Any) -> None:
        kwargs.pop("auto_map", None)  # a saved tokenizer gets the `auto_map` of this class
        kwargs.pop(_NEW_TOKENS, None)
        super().__init__(**kwargs)
        if self.templates is not None:
            self.set_template(*self.templates)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | PathLike[str], *inputs: Any, **kwargs: Any) -> Self:
        """Load a tokenizer from a directory or Hub id.

        A special token passed here (`pad_token="[PAD]"`) that is missing in the vocabulary is added to it, except
        `unk_token`, which the tokenization model defines.

        Raises:
            CtxError: A file is damaged.
        """
        names = set(cls.SPECIAL_TOKENS_ATTRIBUTES) - {"unk_token"}
        if new_tokens := [str(value) for name, value in kwargs.items() if name in names and value is not None]:
            kwargs[_NEW_TOKENS] = new_tokens
        try:
            return super().from_pretrained(pretrained_model_name_or_path, *inputs, **kwargs)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise CtxError(
                f"tokenizer.json or tokenizer_config.json is damaged: {error}.",
                location=str(pretrained_model_name_or_path),
                hint="copy the files again from their source, or train the tokenizer again.",
            ) from error

    @classmethod
    def _from_pretrained(
        cls, resolved_vocab_files: dict[str, Any], pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if (file := resolved_vocab_files.get("tokenizer_config_file")) is not None:
            _check_saved_class(cls, read_json(file), str(pretrained_model_name_or_path))
        return super()._from_pretrained(resolved_vocab_files, pretrained_model_name_or_path, *args, **kwargs)

    def prepare_for_tasks(self) -> None:
        """Add special tokens that only downstream tasks use; fine-tuning then resizes the model's embeddings."""

    @property
    def _auto_map(self) -> dict[str, list[str | None]] | None:
        """The `auto_map` that `save_pretrained` of transformers writes."""
        stub = get_remote_code_stub(self)
        return None if stub is None else stub.tokenizer_auto_map

    def save_pretrained(self, save_directory: str | PathLike[str], *args: Any, **kwargs: Any) -> tuple[str, ...]:
        """Save the tokenizer, and the module for `trust_remote_code=True` (see `core.remote_code`)."""
        if (stub := get_remote_code_stub(self)) is not None:
            stub.write(save_directory)
        return super().save_pretrained(save_directory, *args, **kwargs)

    def export_reference(self, save_directory: str | PathLike[str]) -> None:
        """Save the tokenizer for transformers without this package, as a `PreTrainedTokenizerFast`.

        A tokenizer that prepares texts in Python (`reads_unchanged_text` is False) has no such form: it is saved as by
        `save_pretrained`, with a warning, and needs this package.
        """
        if not self.reads_unchanged_text:
            logger.warning(f"{type(self).__name__} prepares texts in Python: the saved tokenizer needs hf_ctxmodels.")
            self.save_pretrained(save_directory)
            return
        super().save_pretrained(save_directory)
        file = Path(save_directory) / "tokenizer_config.json"
        config = read_json(file)
        config.pop("auto_map", None)
        if extra_tokens := config.pop("extra_special_tokens", None):
            config["additional_special_tokens"] = extra_tokens  # the name in transformers 4, which 5 reads too
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        for name in ("model_input_names", "padding_side", "truncation_side"):  # attributes of the class
            config[name] = getattr(self, name)
        write_text_file(file, json.dumps(config, indent=2, ensure_ascii=False) + "\n")

    def set_template(self, single: str, pair: str) -> None:
        """Set the special tokens around one text, `$A`, and a pair, `$A` and `$B`, by templates of "token:segment",
        such as "{cls}:0 $A:0 {sep}:0". Special tokens that are None are omitted."""
        tokens = {name.removesuffix("_token"): str(token) for name, token in self.special_tokens_map.items()}
        used_tokens = [token for name, token in tokens.items() if f"{{{name}}}" in single + pair]

        def fill(template: str) -> str:
            items = [item for item in template.split() if item[0] == "$" or item[1:].split("}")[0] in tokens]
            return " ".join(item.format(**tokens) for item in items)

        self._tokenizer.post_processor = processors.TemplateProcessing(
            single=fill(single),
            pair=fill(pair),
            special_tokens=[(token, self.convert_tokens_to_ids(token)) for token in used_tokens],
        )


def _check_saved_class(cls: type, fields: Any, location: str) -> None:
    """Raise CtxError if tokenizer_config.json belongs to a tokenizer of transformers with other tokens than `cls`."""
    saved_class = fields.get("tokenizer_class") if isinstance(fields, dict) else None
    if isinstance(fields, dict) and saved_class is None and fields.get("word_tokenizer_type") not in (None, "basic"):
        saved_class = "BertJapaneseTokenizer"  # the first releases do not name the class
    if isinstance(saved_class, str) and saved_class.removesuffix("Fast") in _OTHER_CLASSES:
        raise CtxError(
            f"These are the files of a {saved_class}, which has other tokens than {cls.__name__}.",
            location=location,
            hint="open the tokenizer with transformers: AutoTokenizer.from_pretrained(...).",
        )


def make_mask_token(token: str | AddedToken | None) -> AddedToken | None:
    """A mask token that includes the space before it, as words do; an `AddedToken` or None is returned unchanged."""
    return AddedToken(token, lstrip=True, special=True) if isinstance(token, str) else token


def require_special_tokens(kwargs: dict[str, Any], *names: str) -> None:
    """Raise CtxError if one of these special tokens is None in the tokenizer's arguments."""
    for name in names:
        if kwargs.get(name) is None:
            raise CtxError(f"{name} is None, expected a token of the vocabulary.", hint=f"pass {name}.")


def check_special_tokens(
    vocab: list[str] | dict[str, int],
    names: Iterable[str],
    kwargs: dict[str, Any],
    file: str | None,
    tags: Sequence[str] = (),
) -> None:
    """Raise CtxError if a special token or tag is neither in the vocabulary nor an added token.

    Args:
        names: Keywords of the special tokens, such as "pad_token"; tokens that are None are not checked.
        kwargs: The tokenizer's arguments; tokens in `added_tokens_decoder` were added to the vocabulary, and special
            tokens passed to `from_pretrained` will be.
        file: File of the vocabulary, for the message.
    """
    tokens = [str(kwargs[name]) for name in names if kwargs.get(name) is not None] + [*tags]
    available = {*vocab, *map(str, kwargs.get("added_tokens_decoder", {}).values()), *kwargs.get(_NEW_TOKENS, ())}
    missing = [token for token in tokens if token not in available]
    if missing:
        raise CtxError(
            f"The vocabulary of {len(vocab)} tokens lacks {', '.join(missing)}: it is damaged or from another family.",
            location=file,
            hint="copy it again, or pass tokens with other names as pad_token=, unk_token=, cls_token=, ...",
        )


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase, size: int | None = None) -> str:
    """Digest "<size>:<SHA-256 of tokens and ids>" of a vocabulary, or of its first `size` tokens: tokens that are added
    later have higher ids."""
    tokens_by_id = sorted((number, token) for token, number in tokenizer.get_vocab().items())[:size]
    lines = "".join(f"{number}\t{token}\n" for number, token in tokens_by_id)
    return f"{len(tokens_by_id)}:{hashlib.sha256(lines.encode(errors='surrogatepass')).hexdigest()}"


def record_tokenizer_digest(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Record the tokenizer's digest in a model's configuration, for `check_tokenizer_matches_model`."""
    config.tokenizer_digest = tokenizer_digest(tokenizer)  # type: ignore[attr-defined]


def limit_tokenizer_length(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Lower `model_max_length` to a model's `max_sequence_length`, if it has one, so that `truncation=True` without a
    `max_length` returns inputs that the model accepts."""
    limit = getattr(config, "max_sequence_length", None)
    if limit is not None:
        tokenizer.model_max_length = min(tokenizer.model_max_length, limit)


def check_tokenizer_matches_model(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, max_length: int = 0, *, location: str | None = None
) -> None:
    """Raise CtxError if a tokenizer lacks the characters that a model reads, has more tokens than a model has
    embeddings, or is not the tokenizer that the model was trained with; or if inputs of `max_length` tokens, unless it
    is 0, exceed the model's positions or have no room for text. The errors name the `location`, by default the
    tokenizer's."""
    location = location or tokenizer.name_or_path or type(tokenizer).__name__
    if hasattr(config, "num_characters") and not hasattr(tokenizer, "character_ids"):
        raise CtxError(
            f"{type(tokenizer).__name__} has no characters, which a model with a {type(config).__name__} reads.",
            location=location,
            hint="use a tokenizer of the model's family, from `hf-ctxmodels data tokenizer`.",
        )
    vocab_size = getattr(config, "vocab_size", None)
    if vocab_size is not None and len(tokenizer) > vocab_size:
        raise CtxError(
            f"The vocabulary does not fit the model: the tokenizer has {len(tokenizer)} tokens, the model has "
            f"{vocab_size} embeddings (vocab_size).",
            location=location,
            hint="use the tokenizer the model was trained with, a configuration with a larger vocab_size, or add "
            "embeddings: model.resize_token_embeddings(len(tokenizer)).",
        )
    digest = getattr(config, "tokenizer_digest", None)
    if digest is not None and _CHECKED.get(tokenizer) != (len(tokenizer), digest):
        size = digest.partition(":")[0]
        if not size.isdecimal() or tokenizer_digest(tokenizer, int(size)) != digest:
            raise CtxError(
                f"This is not the tokenizer that the model was trained with: the {size} tokens of that tokenizer "
                "differ in names or ids.",
                location=location,
                hint="copy the files of that tokenizer. To use this one anyway, set --config_options "
                "tokenizer_digest=null if the command has it, or delete tokenizer_digest in the model's config.json.",
            )
        _CHECKED[tokenizer] = (len(tokenizer), digest)
    check_max_length(tokenizer, max_length)
    check_positions(config, max_length)


def check_positions(config: PreTrainedConfig, max_length: int) -> None:
    """Raise CtxError if inputs of this length exceed the model's positions."""
    limit = getattr(config, "max_sequence_length", None)
    if limit is not None and limit < max_length:
        raise CtxError(
            f"Inputs of {max_length} tokens exceed the model's limit of {limit} positions (max_position_embeddings).",
            location=f"--max_length {max_length}",
            hint=f"use --max_length {limit} or less, or a configuration with more positions.",
        )


def check_max_length(tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
    """Raise CtxError if inputs of this length, unless it is 0, have no room for text."""
    special = tokenizer.num_special_tokens_to_add()
    if 0 < max_length <= special:
        raise CtxError(
            f"Inputs of {max_length} tokens leave no room for text after {special} special tokens.",
            location=f"--max_length {max_length}",
            hint=f"use --max_length {special + 1} or more.",
        )


def missing_vocabulary_error(cls: type, kwargs: dict[str, Any]) -> CtxError:
    """The error for a directory without tokenizer files, or a call without a vocabulary."""
    files = " nor ".join(sorted(cls.vocab_files_names.values(), reverse=True))  # type: ignore[attr-defined]
    return CtxError(
        f"A tokenizer without a vocabulary: there is neither {files}.",
        location=kwargs.get("name_or_path") or None,
        hint=f"copy one of these files, or train a tokenizer: `hf-ctxmodels data tokenizer`, or {cls.__name__}.train.",
    )


def empty_text_error() -> CtxError:
    """The error for an empty training text."""
    return CtxError("No text to learn a vocabulary from: all texts are empty or white space.", hint="check the texts.")


def check_vocab_size(vocab_size: int, minimum: int, content: str) -> None:
    """Raise CtxError if a vocabulary has no room for its initial tokens."""
    if vocab_size < minimum:
        raise CtxError(
            f"vocab_size={vocab_size} is too small for {content}.", hint=f"ask for at least {minimum} tokens."
        )
