"""Byte-pair encodings (Sennrich et al. 2016, arXiv 1508.07909): of bytes, of words, and of several languages."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import BatchEncoding

from hf_ctxmodels.core.errors import CtxError, wrap_errors
from hf_ctxmodels.core.flags import check_range
from hf_ctxmodels.core.loading import read_json, read_utf8
from hf_ctxmodels.tokenizers.base import (
    CtxTokenizer,
    check_special_tokens,
    check_vocab_size,
    empty_text_error,
    missing_vocabulary_error,
    require_special_tokens,
)
from hf_ctxmodels.tokenizers.composed_offsets import ComposingTokenizer
from hf_ctxmodels.tokenizers.word_level import TRANSLATION_SEPARATOR, CtxWordTokenizer

END_OF_WORD = "</w>"
CONTINUATION = "@@"
"""Suffix of all subwords of a word except the last one, in files of fastBPE and subword-nmt."""
JOINT_SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")  # in the order of LASER's models
_LANGUAGE_TAG = re.compile(r"<[^<>\s]+>")


class BPETokenizer(CtxTokenizer):
    """A tokenizer whose files are a vocabulary and a list of merges, or a `tokenizer.json`."""

    vocab_files_names = {"vocab_file": "vocab.json", "merges_file": "merges.txt", "tokenizer_file": "tokenizer.json"}
    model_input_names = ["input_ids", "attention_mask"]
    model = BPE
    accepts_counts: ClassVar[bool] = False
    """Whether the lines of `merges.txt` may have a third field, the frequency of the pair."""

    @classmethod
    def convert_to_native_format(cls, trust_remote_code: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Arguments of `__init__` from files. Unlike transformers, it never runs code of a repository, and never
        derives merges from a vocabulary."""
        if kwargs.get("tokenizer_file") is not None:
            return super().convert_to_native_format(**kwargs)
        files = {"vocab": kwargs.get("vocab_file"), "merges": kwargs.get("merges_file")}
        return {**kwargs, **{name: path for name, path in files.items() if kwargs.get(name) is None}}

    @classmethod
    def remap_vocabulary(
        cls, vocab: dict[str, int], pairs: list[tuple[str, str]], kwargs: dict[str, Any]
    ) -> dict[str, int]:
        """Map a file's token ids to this tokenizer's; `kwargs` are the arguments of `__init__`."""
        return vocab

    @classmethod
    def build_model(
        cls,
        vocab: str | dict[str, int] | None,
        merges: str | list[Any] | None,
        kwargs: dict[str, Any],
        tags: Sequence[str] = (),
        **options: Any,
    ) -> BPE:
        """Create the BPE model from the arguments of `__init__`.

        Args:
            vocab: Token -> id, or the path of a `vocab.json`.
            merges: Pairs in the order in which they are merged, or the path of a `merges.txt`.
            kwargs: The remaining arguments; `tokenizer_file` is removed.
            options: Arguments of the model.

        Raises:
            CtxError: A file is missing or damaged, the merges do not belong to the vocabulary, or it lacks a special
                token of `kwargs` or one of the `tags`.
        """
        if "tokenizer_object" in kwargs:  # how `train_new_from_iterator` builds its result
            model_state = json.loads(kwargs["tokenizer_object"].to_str())["model"]
            vocab, merges = model_state["vocab"], model_state["merges"]
        kwargs.pop("tokenizer_file", None)  # already read
        file = vocab if isinstance(vocab, str) else kwargs.get("name_or_path") or None
        hint = "copy it again from its source."
        if not vocab:
            raise missing_vocabulary_error(cls, kwargs)
        if merges is None:
            raise CtxError(
                "The merges are missing: text would be split into single bytes.",
                location=file,
                hint="copy merges.txt to the directory of vocab.json, or use tokenizer.json, which contains both.",
            )
        if isinstance(vocab, str):
            vocab = read_json(vocab, hint="check the path, or copy the file again from its source.")
            if not isinstance(vocab, dict) or not all(isinstance(index, int) for index in vocab.values()):
                raise CtxError("vocab.json does not map tokens to ids.", location=file, hint=hint)
        if isinstance(merges, str):
            path = merges
            merges = [line for line in read_utf8(path).split("\n") if line and not line.startswith("#version")]
            if cls.accepts_counts:
                merges = [re.sub(r"^(\S+ \S+) \d+$", r"\1", line) for line in merges]
            if invalid := [line for line in merges if line.count(" ") != 1]:
                message = f"merges.txt has the line {invalid[0]!r}, which is not two tokens."
                raise CtxError(message, location=path, hint=hint)
        split = (pair.split(" ") if isinstance(pair, str) else pair for pair in merges)
        pairs = [(first, second) for first, second in split]
        if "end_of_word_suffix" in options:  # characters may be unknown, unlike bytes
            require_special_tokens(kwargs, "unk_token")
        table = cls.remap_vocabulary(vocab, pairs, kwargs)
        check_special_tokens(table, cls.SPECIAL_TOKENS_ATTRIBUTES, kwargs, file, tags)
        hint = "copy vocab.json and merges.txt (or tokenizer.json) of the same tokenizer."
        with wrap_errors("The merges do not belong to the vocabulary", location=file, hint=hint):
            if missing := [token for pair in pairs if (token := "".join(pair)) not in table]:
                raise ValueError(f"it has no token {missing[0]!r}")  # the panic of the library is no `Exception`
            return BPE(table, pairs, fuse_unk=False, unk_token=str(kwargs["unk_token"]), **options)


def to_native_subword(subword: str) -> str:
    """Convert a subword with the mark of continuation to one with the mark of the end of a word."""
    stem = subword.removesuffix(CONTINUATION)
    return stem if stem != subword else subword + END_OF_WORD


def to_released_subword(subword: str) -> str:
    """Convert a subword with the mark of the end of a word to one with the mark of continuation."""
    stem = subword.removesuffix(END_OF_WORD)
    return stem if stem != subword else subword + CONTINUATION


def require_text(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts; afterwards, raise CtxError if all are white space."""
    has_text = False
    for text in texts:
        has_text = has_text or bool(text.strip())
        yield text
    if not has_text:
        raise empty_text_error()


class CtxByteBPETokenizer(BPETokenizer):
    """GPT-2's byte-level BPE: no character is unknown, and `decode` restores the text exactly.

    GPT-2's pattern splits text into words, numbers and punctuation, each with the space before it; their UTF-8 bytes,
    represented as 256 printable characters, are merged in the order of the merge list.

    The ids equal the ids of transformers' byte-level tokenizers with the same files (`vocab.json` and `merges.txt`, or
    `tokenizer.json`). Unlike these, it raises an error for a missing vocabulary, merge list or special token, and with
    `is_split_into_words` it keeps words separate even without `add_prefix_space`.

    Args:
        vocab, merges: See `BPETokenizer.build_model`.
        errors: Handling of invalid UTF-8 by `decode`, see `bytes.decode`.
        add_prefix_space: Treat a text's first word as if a space preceded it.
        trim_offsets: Exclude the space from a token's offsets.
        **kwargs: Passed on to `TokenizersBackend`: special tokens, `model_max_length`, `padding_side`, ...
    """

    first_tokens: ClassVar[tuple[str, ...]] = ()
    """Special tokens of a trained vocabulary before the bytes, by id from 0."""

    last_tokens: ClassVar[tuple[str, ...]]
    """Special tokens of a trained vocabulary after the last merge."""

    _template: processors.PostProcessor | None = None  # of `set_template`

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
        self._tokenizer = Tokenizer(self.build_model(vocab, merges, kwargs))
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
        self._tokenizer.decoder = decoders.ByteLevel()
        super().__init__(errors=errors, add_prefix_space=add_prefix_space, trim_offsets=trim_offsets, **kwargs)
        self.trim_offsets = trim_offsets
        self._set_post_processor(add_prefix_space)

    def build_post_processor(self, add_prefix_space: bool) -> processors.PostProcessor:
        """Create the processor that trims offsets; subclasses also add special tokens."""
        return processors.ByteLevel(trim_offsets=self.trim_offsets, add_prefix_space=add_prefix_space)

    def set_template(self, single: str, pair: str) -> None:
        """As in the base class; offsets are still trimmed."""
        super().set_template(single, pair)
        self._template = self._tokenizer.post_processor
        self._set_post_processor(self.add_prefix_space)

    def _set_post_processor(self, add_prefix_space: bool) -> None:
        if self._template is None:
            self._tokenizer.post_processor = self.build_post_processor(add_prefix_space)
        else:
            trim = CtxByteBPETokenizer.build_post_processor(self, add_prefix_space)
            self._tokenizer.post_processor = processors.Sequence([trim, self._template])

    def _encode_plus(self, *args: Any, is_split_into_words: bool = False, **kwargs: Any) -> BatchEncoding:
        if not is_split_into_words or self.add_prefix_space:
            return super()._encode_plus(*args, is_split_into_words=is_split_into_words, **kwargs)
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        self._set_post_processor(add_prefix_space=True)
        try:
            return super()._encode_plus(*args, is_split_into_words=True, **kwargs)
        finally:
            self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            self._set_post_processor(add_prefix_space=False)

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
            vocab_size: Number of tokens including the 256 bytes and special tokens; smaller for a small corpus.
            min_frequency: Minimum frequency of a merged pair.

        Raises:
            CtxError: There is no text, an option is out of range, or `vocab_size` is too small for the bytes.
        """
        check_range({"min_frequency": min_frequency, "model_max_length": model_max_length}, at_least=1)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        minimum = len(cls.first_tokens) + len(alphabet) + len(cls.last_tokens)
        check_vocab_size(vocab_size, minimum, f"the 256 bytes and {minimum - len(alphabet)} special tokens")
        backend = Tokenizer(BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
        size = vocab_size - len(cls.last_tokens)
        first_tokens, texts = list(cls.first_tokens), require_text(texts)
        model_state = train_bpe(backend, texts, first_tokens, size, min_frequency, initial_alphabet=alphabet)
        vocab = model_state["vocab"] | {token: len(model_state["vocab"]) + n for n, token in enumerate(cls.last_tokens)}
        options: dict[str, Any] = {"add_prefix_space": add_prefix_space, "model_max_length": model_max_length}
        return cls(vocab=vocab, merges=model_state["merges"], **options)


class WordBPETokenizer(BPETokenizer):
    """BPE within words: BERT's normalization, splitting at white space and punctuation, and merges.

    Characters outside the vocabulary become `unk_token`; a token that ends a word ends with "</w>".

    Args:
        vocab, merges: See `BPETokenizer.build_model`.
        do_lower_case: Lower-case the text and strip accents.
        **kwargs: Passed on to `TokenizersBackend`: special tokens, `model_max_length`, `padding_side`, ...
    """

    first_tokens: ClassVar[tuple[str, ...]]
    """Special tokens of a trained vocabulary, by id from 0."""

    trained_defaults: ClassVar[dict[str, Any]] = {}
    """Arguments of trained tokenizers that replace `defaults`."""

    def __init__(
        self,
        vocab: str | dict[str, int] | None = None,
        merges: str | list[Any] | None = None,
        do_lower_case: bool = True,
        **kwargs: Any,
    ) -> None:
        kwargs = {**self.defaults, **kwargs}
        self._tokenizer = Tokenizer(self.build_model(vocab, merges, kwargs, end_of_word_suffix=END_OF_WORD))
        _set_splitting(self._tokenizer, do_lower_case)
        self._tokenizer.decoder = decoders.BPEDecoder(suffix=END_OF_WORD)
        super().__init__(do_lower_case=do_lower_case, **kwargs)

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        *,
        do_lower_case: bool = True,
        min_frequency: int = 2,
        model_max_length: int = 512,
    ) -> Self:
        """Learn merges. The vocabulary does not depend on the order of the texts.

        Every character has two tokens, one for the end of a word, as in the released vocabulary. Arguments and errors
        are as in `CtxByteBPETokenizer.train`, but the texts are iterated twice.
        """
        check_range({"min_frequency": min_frequency, "model_max_length": model_max_length}, at_least=1)
        texts = list(texts) if isinstance(texts, Iterator) else texts
        backend = Tokenizer(BPE(unk_token=cls.first_tokens[0], end_of_word_suffix=END_OF_WORD))
        _set_splitting(backend, do_lower_case)
        raw_characters = {character for text in require_text(texts) for character in text}
        characters = {item for raw in raw_characters for item in backend.normalizer.normalize_str(raw)}
        alphabet = sorted(character for character in characters if not character.isspace())
        initial_tokens = [*cls.first_tokens, *alphabet, *(character + END_OF_WORD for character in alphabet)]
        model_state = train_bpe(
            backend, texts, initial_tokens, vocab_size, min_frequency, end_of_word_suffix=END_OF_WORD
        )
        options = {"do_lower_case": do_lower_case, "model_max_length": model_max_length, **cls.trained_defaults}
        return cls(vocab=model_state["vocab"], merges=model_state["merges"], **options)


def train_bpe(
    backend: Tokenizer,
    texts: Iterable[str],
    initial_tokens: list[str],
    vocab_size: int,
    min_frequency: int,
    **options: Any,
) -> dict[str, Any]:
    """Train a backend; returns the state of its model.

    Initial tokens are special tokens and, with an end-of-word suffix, characters, whose ids would otherwise be random.
    """
    check_vocab_size(vocab_size, len(initial_tokens), "special tokens and characters")
    options = {"special_tokens": initial_tokens, "show_progress": False, **options}
    trainer = BpeTrainer(vocab_size=vocab_size, min_frequency=min_frequency, **options)
    backend.train_from_iterator(texts, trainer)
    return json.loads(backend.to_str())["model"]


def _set_splitting(backend: Tokenizer, do_lower_case: bool) -> None:
    backend.normalizer = normalizers.BertNormalizer(lowercase=do_lower_case)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()


class JointBPETokenizer(ComposingTokenizer, BPETokenizer):
    """Joint BPE of words and sequences of other characters in several languages; every text ends with </s>.

    A translation (`text_target`) begins with the tag of its language, such as <de>.

    Args:
        vocab, merges: See `BPETokenizer.build_model`; a word's last token ends with "</w>".
        languages: Tags of the target languages by id.
        do_lower_case: Lower-case the text.
        split_punctuation: Split between letters or digits and other characters, in addition to white space.
        **kwargs: Passed on to `TokenizersBackend`.

    Raises:
        CtxError: The vocabulary is missing or lacks a special token or a tag.

    Example:
        >>> tokenizer = JointBPETokenizer.train(["a cat\\t<de> eine Katze"], vocab_size=60)
        >>> tokenizer.languages
        ['<de>']
    """

    vocab_files_names = {"tokenizer_file": "tokenizer.json"}
    defaults: ClassVar[dict[str, Any]] = dict(
        zip(("bos_token", "pad_token", "eos_token", "unk_token"), JOINT_SPECIAL_TOKENS, strict=True)
    )
    templates = ("$A:0 {eos}:0", "$A:0 {eos}:0 $B:1 {eos}:1")

    def __init__(
        self,
        vocab: dict[str, int] | None = None,
        merges: list[Any] | None = None,
        languages: Sequence[str] = (),
        do_lower_case: bool = True,
        split_punctuation: bool = True,
        **kwargs: Any,
    ) -> None:
        kwargs = {**self.defaults, **kwargs}
        self.languages = list(languages)
        rules = {"do_lower_case": do_lower_case, "split_punctuation": split_punctuation}
        self._tokenizer = self.build_backend(vocab, merges, kwargs, **rules)
        self._tokenizer.add_special_tokens([AddedToken(tag, normalized=False, special=True) for tag in languages])
        super().__init__(languages=self.languages, **rules, **kwargs)
        self.target_pad_token_id, self.target_unknown_id = self.pad_token_id, self.unk_token_id
        self.target_start_id, self.target_end_id = self.bos_token_id, self.eos_token_id

    def build_backend(self, vocab: Any, merges: Any, kwargs: dict[str, Any], **rules: bool) -> Tokenizer:
        """Create the backend from arguments as in `build_model`, and the rules for normalization and splitting."""
        model = self.build_model(vocab, merges, kwargs, self.languages, end_of_word_suffix=END_OF_WORD)
        return _backend(model, **rules)

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        *,
        do_lower_case: bool = True,
        split_punctuation: bool = True,
        min_frequency: int = 2,
        model_max_length: int = 1_000_000,
        **kwargs: Any,
    ) -> Self:
        """Learn merges from texts and translations. The vocabulary does not depend on the order of the texts.

        Args:
            texts: Source texts, each optionally followed by a tab and its translation, which may begin with the tag of
                its language.
            vocab_size: Maximum number of tokens, including special tokens and tags.

        Raises:
            CtxError: There is no text, an option is out of range, or `vocab_size` is too small for its characters.
        """
        check_range({"min_frequency": min_frequency, "model_max_length": model_max_length}, at_least=1)
        texts = list(texts) if isinstance(texts, Iterator) else texts  # iterated several times
        tags = sorted({tag for _, tag, _ in map(_split_example, texts) if tag})
        if not any(map(str.strip, _sources_and_translations(texts))):
            raise empty_text_error()
        rules = {"do_lower_case": do_lower_case, "split_punctuation": split_punctuation}
        backend = _backend(BPE(unk_token="<unk>", end_of_word_suffix=END_OF_WORD), **rules)
        characters: set[str] = set()  # at the end of a word with the suffix
        for text in _sources_and_translations(texts):
            for word, _ in backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(text)):
                characters.update(word[:-1], [word[-1] + END_OF_WORD])
        initial_tokens = [*JOINT_SPECIAL_TOKENS, *tags, *sorted(characters)]
        texts = _sources_and_translations(texts)
        model_state = train_bpe(
            backend, texts, initial_tokens, vocab_size, min_frequency, end_of_word_suffix=END_OF_WORD
        )
        fields = {**rules, "model_max_length": model_max_length, **kwargs}
        return cls(vocab=model_state["vocab"], merges=model_state["merges"], languages=tags, **fields)

    @property
    def target_words(self) -> list[str]:
        """All tokens by id."""
        return self.convert_ids_to_tokens(list(range(len(self))))

    def decode_target(self, sequences: Iterable[Iterable[int]]) -> list[str]:
        """Decode sequences of target ids, without special tokens."""
        return self.batch_decode([[int(token_id) for token_id in ids] for ids in sequences], skip_special_tokens=True)


def _backend(model: BPE, do_lower_case: bool, split_punctuation: bool) -> Tokenizer:
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence(CtxWordTokenizer.normalizers(do_lower_case))
    backend.pre_tokenizer = pre_tokenizers.Whitespace() if split_punctuation else pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.BPEDecoder(suffix=END_OF_WORD)
    return backend


def _split_example(text: str) -> tuple[str, str, str]:
    """Source text, language tag of the translation (empty if missing), and translation."""
    source, _, translation = text.partition(TRANSLATION_SEPARATOR)
    tag, _, tagged_text = translation.partition(" ")
    return (source, tag, tagged_text) if _LANGUAGE_TAG.fullmatch(tag) else (source, "", translation)


def _sources_and_translations(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        source, _, translation = _split_example(text)
        yield source
        yield translation
