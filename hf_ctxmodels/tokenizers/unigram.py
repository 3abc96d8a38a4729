"""SentencePiece unigram tokenizers (Kudo 2018, "Subword Regularization"; Kudo & Richardson 2018, "SentencePiece")."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Self

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import Unigram
from transformers.convert_slow_tokenizer import SentencePieceExtractor, import_protobuf

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range
from hf_ctxmodels.tokenizers.base import (
    CtxTokenizer,
    check_special_tokens,
    check_vocab_size,
    empty_text_error,
    missing_vocabulary_error,
    require_special_tokens,
)

Pieces = list[tuple[str, float]]
"""Pieces with their log probabilities, in the order of the ids."""

UNIGRAM = 1  # `TrainerSpec.model_type` in sentencepiece_model.proto
_MAX_WORDS = 1 << 20  # with which SentencePiece is trained
TRAINING_THREADS = 4  # fixed, since the rounding of sums depends on it


class CtxUnigramTokenizer(CtxTokenizer):
    """Normalizes text, splits it at white space, and chooses the most probable segmentation into pieces.

    Base class of the SentencePiece families; a family sets `defaults`, `templates` and `first_tokens`. It loads
    `tokenizer.json` or, with the package `sentencepiece`, a SentencePiece model file.

    Args:
        vocab: (piece, log probability) by id.
        add_prefix_space: Mark the beginning of the first word too.
        _spm_precompiled_charsmap: SentencePiece's table of character normalization; transformers sets this name.
        **kwargs: `do_lower_case`, `keep_accents` (keep combining accents), special tokens, and arguments of
            `TokenizersBackend`: `model_max_length`, `padding_side`, ...

    Raises:
        CtxError: The vocabulary is missing, damaged or no unigram model, or lacks a special token.
    """

    vocab_files_names = {"vocab_file": "spiece.model", "tokenizer_file": "tokenizer.json"}
    model = Unigram

    first_tokens: ClassVar[tuple[str, ...]]
    """First tokens in the SentencePiece file of a trained vocabulary."""

    normalizes_quotes: ClassVar[bool] = True
    """Whether `` and '' are replaced by a double quotation mark."""

    def __init__(
        self,
        vocab: Pieces | None = None,
        *,
        add_prefix_space: bool = True,
        _spm_precompiled_charsmap: bytes | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs = {**self.defaults, **kwargs}
        if vocab is None and "tokenizer_object" in kwargs:  # how `train_new_from_iterator` builds its result
            vocab = [tuple(entry) for entry in json.loads(kwargs["tokenizer_object"].to_str())["model"]["vocab"]]
        if vocab is None:
            raise missing_vocabulary_error(type(self), kwargs)
        require_special_tokens(kwargs, "unk_token")
        pieces = [piece for piece, _ in vocab]
        names = [f"{name}_token" for name in ("unk", "pad", "cls", "sep", "mask")]
        check_special_tokens(pieces, names, kwargs, kwargs.get("name_or_path") or None)
        kwargs["unk_id"] = pieces.index(str(kwargs["unk_token"]))
        self.do_lower_case, self.keep_accents = kwargs["do_lower_case"], kwargs["keep_accents"]
        self._tokenizer = Tokenizer(Unigram(vocab, unk_id=kwargs["unk_id"], byte_fallback=False))
        steps: list[normalizers.Normalizer] = []  # as ALBERT and XLNet; other families have neither step
        if self.normalizes_quotes:
            steps += [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
        if not self.keep_accents:
            steps += [normalizers.NFKD(), normalizers.StripAccents()]
        if self.do_lower_case:
            steps.append(normalizers.Lowercase())
        if _spm_precompiled_charsmap is not None:
            steps.append(normalizers.Precompiled(_spm_precompiled_charsmap))
        self._tokenizer.normalizer = normalizers.Sequence(steps)
        mark: dict[str, Any] = {"replacement": "▁", "prepend_scheme": "always" if add_prefix_space else "never"}
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(**mark)]
        )
        self._tokenizer.decoder = decoders.Metaspace(**mark)
        super().__init__(add_prefix_space=add_prefix_space, **kwargs)

    @classmethod
    def reorder_vocabulary(cls, pieces: Pieces) -> Pieces:
        """Reorder the vocabulary of a SentencePiece file to this family's ids; by default the same order."""
        return pieces

    @classmethod
    def convert_to_native_format(cls, trust_remote_code: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Arguments of `__init__` from files. Unlike transformers, it never runs code of a repository."""
        vocab_file = kwargs.get("vocab_file")
        if kwargs.get("tokenizer_file") is None and vocab_file is not None:
            arguments = read_sentencepiece(vocab_file, cls.reorder_vocabulary)
            arguments["added_tokens_decoder"] |= kwargs.get("added_tokens_decoder", {})
            return {**kwargs, **arguments}
        return super().convert_to_native_format(**kwargs)

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        *,
        do_lower_case: bool | None = None,
        keep_accents: bool | None = None,
        character_coverage: float = 0.99995,
        model_max_length: int = 512,
    ) -> Self:
        """Learn a vocabulary with SentencePiece. It does not depend on the order of texts of up to two million
        different words.

        SentencePiece is trained on words and their counts, after this tokenizer's normalization with SentencePiece's
        "nmt_nfkc" table, which is saved in the tokenizer. Words of more than 4192 bytes are ignored, and in larger
        texts the rarest words, so that the memory is bounded.

        Args:
            texts: Strings of any length, iterated once.
            do_lower_case, keep_accents: See the class; None for the family's default.
            character_coverage: Share of the characters in the texts that the vocabulary covers.

        Raises:
            CtxError: There is no text, an option is out of range, `vocab_size` is too small for its characters, or
                `sentencepiece` is missing.
        """
        check_range({"character_coverage": character_coverage}, at_least=0.98, at_most=1)  # limits of SentencePiece
        check_range({"model_max_length": model_max_length}, at_least=1)
        rules = {"do_lower_case": do_lower_case, "keep_accents": keep_accents}
        options: dict[str, Any] = {name: value for name, value in rules.items() if value is not None}
        options["model_max_length"] = model_max_length
        specials = cls.reorder_vocabulary([(token, 0.0) for token in cls.first_tokens])
        cls(vocab=specials, **options)  # checks the options
        try:  # before the texts are read
            from sentencepiece import SentencePieceTrainer

            options["_spm_precompiled_charsmap"] = _character_table("nmt_nfkc")
        except ImportError as error:
            raise _sentencepiece_missing("Training") from error
        normalize = cls(vocab=specials, **options).backend_tokenizer.normalizer.normalize_str
        check_vocab_size(vocab_size, len(specials) + 1, f"{len(specials)} special tokens and a character")
        words = _count_words(normalize(text).split() for text in texts)
        if not words:
            raise empty_text_error()
        model, size = BytesIO(), vocab_size - len(specials) + len(cls.first_tokens)
        try:
            SentencePieceTrainer.train(
                sentence_iterator=_counted_lines(words),
                input_format="tsv",
                model_writer=model,
                model_type="unigram",
                vocab_size=size,
                hard_vocab_limit=False,
                character_coverage=character_coverage,
                normalization_rule_name="identity",  # the words are normalized
                unk_id=cls.first_tokens.index("<unk>"),
                bos_id=-1,  # these three are control symbols, which get the remaining ids in order
                eos_id=-1,
                pad_id=-1,
                control_symbols=[token for token in cls.first_tokens if token != "<unk>"],
                num_threads=TRAINING_THREADS,
                minloglevel=2,
            )
        except (RuntimeError, OSError) as error:
            reason = str(error).strip().rpartition("] ")[2]
            raise CtxError(
                f"SentencePiece cannot learn {size} tokens, including {len(cls.first_tokens)} special tokens: {reason}",
                hint="ask for more tokens, or keep fewer characters with character_coverage (0.98 to 1).",
            ) from error
        with TemporaryDirectory() as folder:
            file = Path(folder, "spiece.model")
            file.write_bytes(model.getvalue())
            return cls(**read_sentencepiece(str(file), cls.reorder_vocabulary) | options)


def read_sentencepiece(path: str, reorder_vocabulary: Callable[[Pieces], Pieces]) -> dict[str, Any]:
    """Keyword arguments of the tokenizer of a SentencePiece file: vocabulary by id, character table and added tokens.

    Control symbols become special tokens. User-defined symbols (such as "(" and "." in the released models) become
    added tokens that are not special, unlike in transformers 5.23, so that they are masked and decoded like other text.

    Raises:
        CtxError: The file is damaged or no unigram model, or `sentencepiece` or `protobuf` is not installed.
    """
    try:
        from google.protobuf.message import DecodeError

        extractor = SentencePieceExtractor(path)
    except ImportError as error:
        raise _sentencepiece_missing(f"Reading {path}") from error
    except DecodeError as error:
        raise CtxError(
            f"{Path(path).name} is damaged or no SentencePiece model: {error}.",
            location=path,
            hint="copy the file again from its source, or train the tokenizer again.",
        ) from error
    if extractor.proto.trainer_spec.model_type != UNIGRAM or not extractor.proto.pieces:
        hint = "load it with the tokenizer of its family."
        raise CtxError(f"{Path(path).name} is not a unigram model.", location=path, hint=hint)
    extracted = extractor.extract(Unigram)
    symbols: list[AddedToken] = extracted.pop("additional_special_tokens")
    extracted["vocab"] = reorder_vocabulary(extracted["vocab"])
    ids = {piece: index for index, (piece, _) in enumerate(extracted["vocab"])}
    extracted["added_tokens_decoder"] = {ids[symbol.content]: symbol for symbol in symbols}
    return extracted


def _character_table(rule_name: str) -> bytes:
    """The table of one of SentencePiece's normalization rules; raises ImportError without its packages."""
    from sentencepiece import SentencePieceNormalizer

    normalizer = SentencePieceNormalizer(rule_name=rule_name)
    proto = import_protobuf().ModelProto.FromString(normalizer.serialized_model_proto())
    table: bytes = proto.normalizer_spec.precompiled_charsmap
    return table


def _count_words(texts: Iterable[list[str]]) -> Counter[str]:
    """The `_MAX_WORDS` most frequent words with their counts, in which early occurrences of rare words may be missing
    (Manku & Motwani 2002, "Approximate Frequency Counts over Data Streams")."""
    words = Counter[str]()
    for text in texts:
        words.update(text)
        if len(words) > 2 * _MAX_WORDS:
            words = _most_frequent(words)
    return _most_frequent(words)


def _most_frequent(words: Counter[str]) -> Counter[str]:
    if len(words) <= _MAX_WORDS:
        return words
    return Counter(dict(sorted(words.items(), key=lambda item: (-item[1], item[0]))[:_MAX_WORDS]))


def _counted_lines(words: Counter[str]) -> Iterator[str]:
    """Lines of words with their counts, in a fixed order.

    A candidate piece of SentencePiece must have two different successors. A word that occurs twice in a line is
    followed by itself and by the end of the line. Otherwise, no word of a small text would become a piece.
    """
    for word, count in sorted(words.items()):
        if count > 1:
            yield f"{word} {word}\t{count // 2}"
        if count % 2:
            yield f"{word}\t1"


def _sentencepiece_missing(action: str) -> CtxError:
    return CtxError(
        f"{action} requires the packages sentencepiece and protobuf.",
        hint="pip install 'hf_ctxmodels[sentencepiece]'.",
    )
