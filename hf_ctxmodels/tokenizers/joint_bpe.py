"""Joint byte-pair encoding of several languages (Sennrich et al. 2016, arXiv 1508.07909)."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.tokenizers.base import (
    CtxTokenizer,
    check_special_tokens,
    empty_text_error,
    get_special_tokens,
    missing_vocabulary_error,
)
from hf_ctxmodels.tokenizers.translation import TRANSLATION_SEPARATOR

SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")  # in the released models' order
END_OF_WORD = "</w>"
_TAG = re.compile(r"<[^<>\s]+>")


class JointBPETokenizer(CtxTokenizer):
    """Joint BPE of words and sequences of other characters in several languages; every text ends with </s>.

    A translation (`text_target`) begins with the tag of its language, such as <de>.

    Args:
        vocab: Token -> id; a word's last token ends with "</w>".
        merges: Pairs of tokens in the order of merging.
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
    model_input_names = ["input_ids", "attention_mask"]
    model = BPE
    defaults: ClassVar[dict[str, Any]] = {
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    templates = ("$A:0 {eos}:0", "$A:0 {eos}:0 $B:1 {eos}:1")

    def __init__(
        self,
        vocab: dict[str, int] | None = None,
        merges: Sequence[tuple[str, str]] | None = None,
        languages: Sequence[str] = (),
        do_lower_case: bool = True,
        split_punctuation: bool = True,
        **kwargs: Any,
    ) -> None:
        if vocab is None and "tokenizer_object" in kwargs:  # how `train_new_from_iterator` builds its result
            model_state = json.loads(kwargs["tokenizer_object"].to_str())["model"]
            vocab, merges = model_state["vocab"], model_state["merges"]
        if vocab is None:
            raise missing_vocabulary_error(type(self), kwargs)
        kwargs = {**self.defaults, **kwargs}
        self.languages = list(languages)
        rules = {"do_lower_case": do_lower_case, "split_punctuation": split_punctuation}
        tokens = [*get_special_tokens(kwargs, self.defaults), *self.languages]
        check_special_tokens(vocab, tokens, kwargs, kwargs.get("name_or_path") or None)
        pairs = [(first, second) for first, second in merges or ()]
        model = BPE(vocab, pairs, unk_token=str(kwargs["unk_token"]), end_of_word_suffix=END_OF_WORD)
        self._tokenizer = _backend(model, **rules)
        self._tokenizer.add_special_tokens([AddedToken(tag, normalized=False, special=True) for tag in languages])
        super().__init__(languages=self.languages, **rules, **kwargs)

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
            do_lower_case, split_punctuation: See the class.
            min_frequency: Minimum frequency of a merged pair.
            model_max_length: Maximum input length in tokens.
            kwargs: Arguments of the class.

        Raises:
            CtxError: There is no text, or `vocab_size` is too small for its characters.
        """
        texts = list(texts) if isinstance(texts, Iterator) else texts  # iterated several times
        tags = sorted({tag for _, tag, _ in map(_split_example, texts) if tag})
        if not any(map(str.strip, _sources_and_translations(texts))):
            raise empty_text_error()
        rules = {"do_lower_case": do_lower_case, "split_punctuation": split_punctuation}
        backend = _backend(BPE(unk_token="<unk>", end_of_word_suffix=END_OF_WORD), **rules)
        trainer = BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=min_frequency,
            # otherwise the ids of word-final characters are random
            special_tokens=[*SPECIAL_TOKENS, *tags, *_characters(_sources_and_translations(texts), backend)],
            end_of_word_suffix=END_OF_WORD,
            show_progress=False,
        )
        backend.train_from_iterator(_sources_and_translations(texts), trainer)
        model_state = json.loads(backend.to_str())["model"]
        if len(model_state["vocab"]) > vocab_size:
            raise CtxError(
                f"The texts have {len(model_state['vocab'])} characters, special tokens and tags, but "
                f"vocab_size={vocab_size}.",
                hint="use a larger vocab_size.",
            )
        fields = {**rules, "model_max_length": model_max_length, **kwargs}
        return cls(vocab=model_state["vocab"], merges=model_state["merges"], languages=tags, **fields)

    @property
    def target_words(self) -> list[str]:
        """List of all tokens in the order of their ids."""
        return self.convert_ids_to_tokens(list(range(len(self))))

    @property
    def target_pad_token_id(self) -> int:
        """Id of padding in targets."""
        return self.pad_token_id

    @property
    def target_start_id(self) -> int:
        """Id of the decoder's first input."""
        return self.bos_token_id

    @property
    def target_end_id(self) -> int:
        """Id of the end of a target."""
        return self.eos_token_id

    @property
    def target_unknown_id(self) -> int:
        """Id of characters outside the vocabulary."""
        return self.unk_token_id

    def decode_target(self, sequences: Iterable[Iterable[int]]) -> list[str]:
        """Decode sequences of target ids, without special tokens."""
        return self.batch_decode([[int(token_id) for token_id in ids] for ids in sequences], skip_special_tokens=True)


def _backend(model: BPE, do_lower_case: bool, split_punctuation: bool) -> Tokenizer:
    backend = Tokenizer(model)
    steps = [normalizers.NFC(), *([normalizers.Lowercase()] if do_lower_case else [])]
    backend.normalizer = normalizers.Sequence(steps)
    backend.pre_tokenizer = pre_tokenizers.Whitespace() if split_punctuation else pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.BPEDecoder(suffix=END_OF_WORD)
    return backend


def _split_example(text: str) -> tuple[str, str, str]:
    """Source text, language tag of the translation (empty if missing), and translation."""
    source, _, translation = text.partition(TRANSLATION_SEPARATOR)
    tag, _, tagged_text = translation.partition(" ")
    return (source, tag, tagged_text) if _TAG.fullmatch(tag) else (source, "", translation)


def _sources_and_translations(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        source, _, translation = _split_example(text)
        yield source
        yield translation


def _characters(texts: Iterable[str], backend: Tokenizer) -> list[str]:
    """Sorted characters, those at the end of a word with the suffix."""
    characters: set[str] = set()
    for text in texts:
        for word, _ in backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(text)):
            characters.update(word[:-1], [word[-1] + END_OF_WORD])
    return sorted(characters)
