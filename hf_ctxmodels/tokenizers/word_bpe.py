"""Byte-pair encoding of lower-cased words; a word's last token ends with "</w>" (Radford et al. 2018, section 4.1)."""

import json
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Self

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.tokenizers.bpe import BPETokenizer, build_bpe, require_text

END_OF_WORD = "</w>"


class WordBPETokenizer(BPETokenizer):
    """BPE within words: BERT's normalisation, splitting at white space and punctuation, and merges.

    Characters outside the vocabulary become `unk_token`.

    Args:
        vocab: Token -> id, or the path of a `vocab.json`; a token that ends a word ends with "</w>".
        merges: Pairs in the order in which they are merged, or the path of a `merges.txt`.
        do_lower_case: Lower-case the text and strip accents.
        **kwargs: Passed on to `TokenizersBackend`: special tokens, `model_max_length`, `padding_side`, ...

    Raises:
        CtxError: The vocabulary or the merges are missing, damaged or of different tokenizers, or a special token is
            missing.
    """

    first_tokens: ClassVar[tuple[str, ...]]
    """Special tokens of a trained vocabulary, by id from 0."""

    trained_defaults: ClassVar[dict[str, Any]] = {}
    """Special tokens of trained tokenizers in addition to `defaults`."""

    def __init__(
        self,
        vocab: str | dict[str, int] | None = None,
        merges: str | list[Any] | None = None,
        do_lower_case: bool = True,
        **kwargs: Any,
    ) -> None:
        kwargs = {**self.defaults, **kwargs}
        table, pairs, file = self.read_vocabulary_and_merges(vocab, merges, kwargs)
        self._tokenizer = Tokenizer(
            build_bpe(table, pairs, file, unk_token=str(kwargs["unk_token"]), end_of_word_suffix=END_OF_WORD)
        )
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

        Every character has two tokens, one for the end of a word, as in the released vocabulary.

        Args:
            texts: Strings of any length, iterated twice; an iterator is converted to a list.
            vocab_size: Number of tokens including characters and special tokens; smaller for a small corpus.
            do_lower_case: See the class.
            min_frequency: Minimum frequency of a merged pair.
            model_max_length: Maximum input length in tokens, including special tokens.

        Raises:
            CtxError: There is no text, or `vocab_size` is too small for its characters.
        """
        texts = list(texts) if isinstance(texts, Iterator) else texts
        backend = Tokenizer(BPE(unk_token=cls.first_tokens[0], end_of_word_suffix=END_OF_WORD))
        _set_splitting(backend, do_lower_case)
        alphabet = _alphabet(require_text(texts), backend.normalizer)
        initial_tokens = [*cls.first_tokens, *alphabet, *(character + END_OF_WORD for character in alphabet)]
        if len(initial_tokens) > vocab_size:
            raise CtxError(
                f"The texts have {len(alphabet)} different characters with two tokens each, but "
                f"vocab_size={vocab_size}.",
                hint=f"ask for at least {len(initial_tokens)} tokens.",
            )
        trainer = BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=min_frequency,
            special_tokens=initial_tokens,  # otherwise the ids of word-final characters are random
            end_of_word_suffix=END_OF_WORD,
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        model_state = json.loads(backend.to_str())["model"]
        options = {"do_lower_case": do_lower_case, "model_max_length": model_max_length, **cls.trained_defaults}
        return cls(vocab=model_state["vocab"], merges=model_state["merges"], **options)


def _set_splitting(backend: Tokenizer, do_lower_case: bool) -> None:
    backend.normalizer = normalizers.BertNormalizer(lowercase=do_lower_case)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()


def _alphabet(texts: Iterable[str], normalizer: normalizers.Normalizer) -> list[str]:
    """Sorted characters of the normalised texts, without white space."""
    raw: set[str] = set()
    for text in texts:
        raw.update(text)
    normalized = {character for raw_character in raw for character in normalizer.normalize_str(raw_character)}
    return sorted(character for character in normalized if not character.isspace())
