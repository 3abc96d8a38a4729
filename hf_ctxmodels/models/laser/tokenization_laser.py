"""Tokenizer of LASER."""

from os import PathLike
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.models.laser.released_text import FastBPE, ReleasedSubwords, SentencePieces, replace_non_printing
from hf_ctxmodels.tokenizers.base import check_special_tokens
from hf_ctxmodels.tokenizers.bpe import JointBPETokenizer
from hf_ctxmodels.tokenizers.moses import MosesTokenizer


class CtxLaserTokenizer(MosesTokenizer, JointBPETokenizer):
    """Joint BPE of all languages; see `JointBPETokenizer` for arguments, training and errors.

    The tokenizer of a converted encoder prepares texts as the released code does, and looks up the subwords in the
    encoder's dictionary, so that the ids equal the released ones; a subword that the dictionary lacks is `<unk>`.
    Offsets refer to the text of the subwords.

    - LASER1: `moses_language="en"` splits text into words, see `MosesTokenizer`, and fastBPE splits the lower-cased
      words. Chinese, Japanese and Thai must be split beforehand, and Greek must be romanized.
    - LASER2: punctuation is normalized by the English Moses rules, and SentencePiece splits the lower-cased text.
      `moses_language` cannot be set.

    Args:
        vocab, merges: See `JointBPETokenizer`; with `subwords`, the dictionary of the encoder, and no merges.
        subwords: Splitter of a release.

    Raises:
        CtxError: As in `JointBPETokenizer`, or the file of the splitter is missing or damaged.
    """

    vocab_files_names = {
        "tokenizer_file": "tokenizer.json",
        "merges_file": FastBPE.file_name,
        "vocab_file": SentencePieces.file_name,
    }

    def __init__(
        self,
        vocab: dict[str, int] | None = None,
        merges: list[Any] | None = None,
        *,
        subwords: ReleasedSubwords | None = None,
        **kwargs: Any,
    ) -> None:
        self._subwords = subwords
        self.prepares_subwords = subwords is not None
        super().__init__(vocab, merges, **kwargs)

    @classmethod
    def convert_to_native_format(cls, trust_remote_code: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Arguments of `__init__` from files."""
        merges_file, pieces_file = kwargs.pop("merges_file", None), kwargs.pop("vocab_file", None)
        arguments = super().convert_to_native_format(**kwargs)
        vocab = arguments.get("vocab")
        if vocab and arguments.get("merges") is None:
            if pieces_file is not None:
                arguments["subwords"] = SentencePieces(pieces_file)
            elif merges_file is not None:
                arguments["subwords"] = FastBPE.read(merges_file, vocab)
            else:
                raise CtxError(
                    f"The tokenizer of a released encoder lacks {FastBPE.file_name} (LASER1) or "
                    f"{SentencePieces.file_name} (LASER2).",
                    location=kwargs.get("name_or_path") or None,
                    hint="copy the file from the directory of the converted model.",
                )
        return arguments

    def build_backend(self, vocab: Any, merges: Any, kwargs: dict[str, Any], **rules: Any) -> Tokenizer:
        """Create the backend; for a release, a lookup of subwords that are separated by spaces."""
        if self._subwords is None:
            return super().build_backend(vocab, merges, kwargs, **rules)
        kwargs.pop("tokenizer_file", None)
        check_special_tokens(vocab, self.SPECIAL_TOKENS_ATTRIBUTES, kwargs, kwargs.get("name_or_path") or None)
        backend = Tokenizer(WordLevel(vocab, unk_token=str(kwargs["unk_token"])))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        backend.decoder = self._subwords.decoder()
        return backend

    def check_language(self, language: Any) -> None:
        """Raise CtxError for a language without Moses rules, and for any language if text is not split into words."""
        if self._subwords is not None and not self._subwords.accepts_words:
            raise CtxError(
                "The tokenizer of LASER2 does not split words by the Moses rules.",
                location=f"moses_language={language!r}",
                hint="omit moses_language.",
            )
        super().check_language(language)

    def prepare_text(self, text: str, is_split_into_words: bool) -> str:
        """Prepare a text, or a word of a text that is split into words, for the backend."""
        if self._subwords is None:
            return super().prepare_text(text, is_split_into_words)
        return self._subwords.split(super().prepare_text(replace_non_printing(text), is_split_into_words))

    def _save_pretrained(
        self, save_directory: str | PathLike[str], file_names: tuple[str, ...], *args: Any, **kwargs: Any
    ) -> tuple[str, ...]:
        file_names = super()._save_pretrained(save_directory, file_names, *args, **kwargs)
        if self._subwords is None:
            return file_names
        file = Path(save_directory) / self._subwords.file_name
        self._subwords.save(file)
        return (*file_names, str(file))
