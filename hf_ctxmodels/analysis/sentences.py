"""Sentences, as texts or lists of words, from the files of all analyses that need no annotation."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from hf_ctxmodels.architectures.word_alignment import Sentence, split_words
from hf_ctxmodels.core.errors import CtxError
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


def _sentences_of_file(file: str) -> Iterator[Sentence]:
    if is_treebank(file):
        yield from (sentence.words for sentence in read_treebank(file))
        return
    if document_suffix(file) not in FILE_SUFFIXES:
        raise CtxError(
            f"Cannot read sentences from a file with the suffix {document_suffix(file)!r}.",
            location=file,
            hint=f"use one of .conllu, {', '.join(FILE_SUFFIXES)}, plain or compressed.",
        )
    for paragraphs in read_file(FileRange(file), TextColumns(), "line"):
        yield from paragraphs
