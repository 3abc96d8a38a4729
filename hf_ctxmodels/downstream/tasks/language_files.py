"""Files of a task in several languages, named as in Universal Dependencies and WikiANN."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hf_ctxmodels.core.errors import CtxError

# Task -> pattern of the file name of a language and split.
NAMES = {"pos": "{language}_*-ud-{split}.conllu*", "ner": "{language}.{split}.txt*"}


def directories_of_languages(
    entries_text: str | None, languages: Iterable[str], content: str, location: str
) -> dict[str, str]:
    """Language -> directory, from `de=DIR,fr=DIR`; empty if not given.

    Args:
        entries_text: The flag's value.
        languages: Languages that must have a directory.
        content: Content of a directory, for the error message.
        location: Name of the flag, for the error message.

    Raises:
        CtxError: A language has no directory, or an entry has another form.
    """
    if not entries_text:
        return {}
    entries = [entry.strip().partition("=")[::2] for entry in entries_text.split(",")]
    directories = {language: directory for language, directory in entries if directory}
    missing = [language for language in languages if language not in directories]
    if missing or len(directories) < len(entries):
        raise CtxError(
            f"There is no {content} of the language {missing[0]!r}."
            if missing
            else f"An entry is not LANGUAGE=DIR, or occurs twice: {entries_text}.",
            location=location,
            hint=f"use LANGUAGE=DIR for each language, separated by commas; found {', '.join(directories) or 'none'}.",
        )
    return directories


@dataclass(frozen=True)
class LanguageFile:
    """A file and its language."""

    language: str
    file: Path

    @classmethod
    def find(cls, entry: str, task: str, split: str, folder: str | None) -> Self:
        """The file in an entry `de=FILE`, or the file of language `de` in a directory or its subdirectories.

        Args:
            entry: LANGUAGE or LANGUAGE=FILE.
            task: A key of `NAMES`.
            split: "train", "dev" or "test".
            folder: Directory to search for the file of a language.

        Raises:
            CtxError: There is no such file, or more than one.
        """
        language, separator, file = entry.partition("=")
        if separator:
            return cls(language, Path(file))
        pattern = NAMES[task].format(language=language, split=split)
        paths = sorted(Path(folder).rglob(pattern)) if folder and language.isalpha() else []
        if len(paths) != 1:
            raise CtxError(
                f"{len(paths) or 'No'} file{'s' if len(paths) != 1 else ''} {pattern} in {folder or '--data_dir'}"
                + "".join(f"\n  {path}" for path in paths),
                location=entry,
                hint=f"use the file: {language}=FILE.",
            )
        return cls(language, paths[0])

    def split(self, name: str) -> Self:
        """The file of another split in the training file's directory, whose name has `-train` or `.train`.

        Raises:
            CtxError: There is no such file.
        """
        for mark in ("-train", ".train"):
            path = self.file.with_name(self.file.name.replace(mark, mark.replace("train", name)))
            if path != self.file and path.is_file():
                return type(self)(self.language, path)
        raise CtxError(
            f"There is no {name} file in the directory of the training file.",
            location=str(self.file),
            hint="pass --validation_file.",
        )
