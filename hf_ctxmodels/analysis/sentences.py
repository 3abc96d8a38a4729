"""Sentences, as texts or lists of words, from the files of all analyses that need no annotation."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from hf_ctxmodels.architectures.word_alignment import Sentence, split_words
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.files import is_directory, missing_file_error
from hf_ctxmodels.data.text_files import FILE_SUFFIXES, FileRange, TextColumns, document_suffix, read_file
from hf_ctxmodels.data.treebanks import is_treebank, read_treebank


def read_sentences(files: Sequence[str | Path]) -> list[Sentence]:
    """The sentences of files: of CoNLL-U files their words, of other files their lines.

    Raises:
        CtxError: A file cannot be read, has another suffix, or there are no sentences.
    """
    sentences = [sentence for file in files for sentence in _sentences_of_file(str(file)) if split_words(sentence)]
    if not sentences:
        raise CtxError("No sentences.", location=", ".join(map(str, files)), hint="use files with text.")
    return sentences


def check_sentence_file(file: str, location: str, suffixes: Sequence[str] = FILE_SUFFIXES) -> None:
    """Raise CtxError if a file does not have the suffix of a format that `read_file` reads."""
    if document_suffix(file) not in FILE_SUFFIXES:
        if is_directory(file):
            raise missing_file_error(file)
        raise CtxError(
            f"Cannot read sentences from a file with the suffix {document_suffix(file)!r}.",
            location=location,
            hint=f"use one of {', '.join(suffixes)}, plain or compressed.",
        )


def _sentences_of_file(file: str) -> Iterator[Sentence]:
    if is_treebank(file):
        yield from (sentence.words for sentence in read_treebank(file))
        return
    check_sentence_file(file, file, (".conllu", *FILE_SUFFIXES))
    for paragraphs in read_file(FileRange(file), TextColumns(), "line"):
        yield from paragraphs
