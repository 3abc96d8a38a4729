"""Files of a task in several languages, by the names that Universal Dependencies and WikiANN give them."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hf_ctxmodels.core.errors import CtxError

# Task -> the file name of a language and split, and the splits of the same data.
NAMES = {"pos": "{language}_*-ud-{split}.conllu*", "ner": "{language}.{split}.txt*"}


def directories_of_languages(given: str | None, languages: Iterable[str], what: str, location: str) -> dict[str, str]:
    """Language -> directory, from `de=DIR,fr=DIR`; none without it.

    Args:
        given: The flag's value.
        languages: Those that must have one.
        what: What lies in a directory, for the error.
        location: The flag, likewise.

    Raises:
        CtxError: One of the languages has none, or an entry has another form.
    """
    if not given:
        return {}
    entries = [entry.strip().partition("=")[::2] for entry in given.split(",")]
    found = {language: directory for language, directory in entries if directory}
    missing = [language for language in languages if language not in found]
    if missing or len(found) < len(entries):
        raise CtxError(
            f"There is no {what} of the language {missing[0]!r}."
            if missing
            else f"An entry is not LANGUAGE=DIR, or stands twice: {given}.",
            location=location,
            hint=f"give LANGUAGE=DIR for each language, separated by commas; given are {', '.join(found) or 'none'}.",
        )
    return found


@dataclass(frozen=True)
class LanguageFile:
    """A file and its language."""

    language: str
    file: Path

    @classmethod
    def find(cls, given: str, task: str, split: str, folder: str | None) -> Self:
        """`de=FILE`, or the file of `de` in a folder or a folder of it.

        Args:
            given: A language code, or a code, `=` and a file.
            task: A key of `NAMES`.
            split: "train", "dev" or "test".
            folder: Where to look for a file of which the language alone is given.

        Raises:
            CtxError: There is no such file, or several.
        """
        language, equals, file = given.partition("=")
        if equals:
            return cls(language, Path(file))
        pattern = NAMES[task].format(language=language, split=split)
        found = sorted(Path(folder).rglob(pattern)) if folder and language.isalpha() else []
        if len(found) != 1:
            raise CtxError(
                f"{len(found) or 'No'} file{'s' if len(found) != 1 else ''} {pattern} in {folder or '--data_dir'}"
                + "".join(f"\n  {each}" for each in found),
                location=given,
                hint=f"give the file: {language}=FILE.",
            )
        return cls(language, found[0])

    def split(self, name: str) -> Self:
        """The file of another split beside a training file, `-train` or `.train` being part of its name.

        Raises:
            CtxError: There is none.
        """
        for mark in ("-train", ".train"):
            path = self.file.with_name(self.file.name.replace(mark, mark.replace("train", name)))
            if path != self.file and path.is_file():
                return type(self)(self.language, path)
        raise CtxError(
            f"There is no {name} file beside the training file.",
            location=str(self.file),
            hint="give --validation_file.",
        )
