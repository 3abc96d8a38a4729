"""Byte-pair encoding of lower-cased words, whose last subword ends with "</w>" (Radford et al. 2018, section 4.1)."""

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
    """BPE within words: BERT's normalisation and splitting at white space and punctuation, then merges.

    Characters outside the vocabulary are `unk_token`.

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
    """The special tokens of a newly trained vocabulary, in the order of their ids from 0 on."""

    trained: ClassVar[dict[str, Any]] = {}
    """Special tokens of newly trained tokenizers only, beside `defaults`."""

    def __init__(
        self,
        vocab: str | dict[str, int] | None = None,
        merges: str | list[Any] | None = None,
        do_lower_case: bool = True,
        **kwargs: Any,
    ) -> None:
        kwargs = {**self.defaults, **kwargs}
        table, pairs, file = self.read(vocab, merges, kwargs)
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
        """Learn merges. The same texts, in whatever order, give the same vocabulary.

        Every character has two tokens, within a word and at its end, as in the released vocabulary.

        Args:
            texts: Strings of any length; read twice, and an iterator is kept in memory.
            vocab_size: Number of tokens, characters and special ones included; a small corpus may give fewer.
            do_lower_case: See the class.
            min_frequency: A pair seen fewer times is not merged.
            model_max_length: Longest input of the model in tokens, special tokens included.

        Raises:
            CtxError: There is no text, or `vocab_size` is too small for its characters.
        """
        texts = list(texts) if isinstance(texts, Iterator) else texts
        backend = Tokenizer(BPE(unk_token=cls.first_tokens[0], end_of_word_suffix=END_OF_WORD))
        _set_splitting(backend, do_lower_case)
        alphabet = _alphabet(require_text(texts), backend.normalizer)
        needed = [*cls.first_tokens, *alphabet, *(character + END_OF_WORD for character in alphabet)]
        if len(needed) > vocab_size:
            raise CtxError(
                f"The texts have {len(alphabet)} different characters, each with a token within a word and one at its "
                f"end, but vocab_size={vocab_size}.",
                hint=f"ask for at least {len(needed)} tokens.",
            )
        trainer = BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=min_frequency,
            special_tokens=needed,  # else the library numbers ends of words in no fixed order
            end_of_word_suffix=END_OF_WORD,
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        learned = json.loads(backend.to_str())["model"]
        options = {"do_lower_case": do_lower_case, "model_max_length": model_max_length, **cls.trained}
        return cls(vocab=learned["vocab"], merges=learned["merges"], **options)


def _set_splitting(backend: Tokenizer, do_lower_case: bool) -> None:
    backend.normalizer = normalizers.BertNormalizer(lowercase=do_lower_case)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()


def _alphabet(texts: Iterable[str], normalizer: normalizers.Normalizer) -> list[str]:
    """The characters of the normalised texts, sorted, without white space."""
    raw: set[str] = set()
    for text in texts:
        raw.update(text)
    found = {character for each in raw for character in normalizer.normalize_str(each)}
    return sorted(character for character in found if not character.isspace())
