"""Languages of models and files: the language of input, and the files of a task in several languages."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import join_choice
from hf_ctxmodels.data.files import split_dataset_options
from hf_ctxmodels.data.hub_datasets import is_dataset, source_name

# Task -> pattern of the file name of a language and split, as in Universal Dependencies and WikiANN.
NAMES = {"pos": "{language}_*-ud-{split}.conllu*", "ner": "{language}.{split}.txt*"}
_SPLITS = {"train", "dev", "validation", "test"}


def supported_languages(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The languages that a model has embeddings of, or that its tokenizer marks; empty for other models."""
    if hasattr(config, "default_lang") and getattr(config, "lang2id", None):
        return list(config.lang2id)
    return list(getattr(tokenizer, "languages", ()))


def set_language(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, language: str, location: str) -> None:
    """Set the language of input without a language tag: `config.default_lang` if the model has language embeddings,
    `tokenizer.language` if the tokenizer marks words, or splits them by the rules of a language.

    Raises:
        CtxError: The model does not support the language; `location` is the flag.
    """
    languages = supported_languages(config, tokenizer)
    if language not in languages:
        raise CtxError(
            f"The model has no embedding of the language {language!r}."
            if languages
            else "The model does not distinguish languages.",
            location=location,
            hint=f"use one of {', '.join(languages)}." if languages else "remove it.",
        )
    if getattr(config, "lang2id", None):
        config.default_lang = config.lang2id[language]  # type: ignore[attr-defined]
    if not getattr(config, "lang2id", None) or getattr(tokenizer, "tokens_depend_on_language", False):
        tokenizer.language = language  # type: ignore[attr-defined]


def split_language(entry: str) -> tuple[str, str]:
    """The language and the file of an entry FILE or LANGUAGE=FILE; the language is empty for FILE, whose directories
    may have equals signs."""
    language, equals, file = entry.partition("=")
    return (language, file) if equals and "/" not in language else ("", entry)


def split_entries(text: str) -> list[str]:
    """The entries in a list separated by commas. A comma before an option of a dataset belongs to its entry, as in
    `de=NAME:config=de,split=test,fr=FILE`."""
    return [entry.strip() for entry in re.split(r",(?!(?:config|split)=)", text)]


def directories_of_languages(
    entries_text: str | None, languages: Iterable[str], content: str, location: str
) -> dict[str, str]:
    """Language -> directory, from the value `de=DIR,fr=DIR` of the flag `location`; empty if not given. Raises CtxError
    if one of the `languages` has no directory; `content` describes the directories."""
    if not entries_text:
        return {}
    entries = [split_language(entry.strip()) for entry in entries_text.split(",")]
    directories = {language: directory for language, directory in entries if language and directory}
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


def _is_named_after(name: str, language: str, split: str) -> bool:
    tags = set(re.split(r"[._-]", name))
    return language in tags and (split in tags or (split in _SPLITS and not tags & _SPLITS))


@dataclass(frozen=True)
class LanguageFile:
    """A language, and a file or a dataset as in `finetune`."""

    language: str
    file: str

    @property
    def name(self) -> str:
        """Name of the file, or the dataset without its options."""
        return source_name(self.file)

    @classmethod
    def find(cls, entry: str, task: str, split: str, folder: str | None) -> Self:
        """The file in an entry `de=FILE`, or the only file of language `de` below a directory.

        The names of files of a task in `NAMES` match its pattern. Of other tasks, the language and the split are parts
        of the name between `.`, `-` and `_` (`xnli.test.de.tsv`), or the language alone if the name has no split
        (`xquad.de.json`). `split` is "train", "dev" or "test", or another language for files of translations
        (`tatoeba.en-de.tsv`).
        """
        language, file = split_language(entry)
        if language:
            return cls(language, file)
        language = entry
        pattern = NAMES.get(task, "*{language}*{split}*").format(language=language, split=split)
        if not folder:
            raise CtxError(
                f"The language {language!r} has no file, and there is no directory of files.",
                location=entry,
                hint=f"pass {language}=FILE, or --data_dir DIR, a directory with the file {pattern}.",
            )
        paths: list[Path] = []
        if language.isalpha():
            paths = sorted(Path(folder).rglob(pattern if task in NAMES else "*"))
        if task not in NAMES:
            paths = [path for path in paths if path.is_file() and _is_named_after(path.name, language, split)]
        if len(paths) != 1:
            raise CtxError(
                f"{len(paths) or 'No'} file{'s' if len(paths) != 1 else ''} {pattern} in {folder}"
                + "".join(f"\n  {path}" for path in paths),
                location=entry,
                hint=f"use the file: {language}=FILE.",
            )
        return cls(language, str(paths[0]))

    @property
    def validation_file(self) -> str:
        """The dev file in the directory of a training file, whose name has `-train` or `.train`; of a dataset the
        validation split. Raises CtxError if there is no such file."""
        if is_dataset(self.file):
            name, options = split_dataset_options(self.file)
            return join_choice(name, options | {"split": "validation"})
        path = Path(self.file)
        for mark in ("-train", ".train"):
            dev_path = path.with_name(path.name.replace(mark, mark.replace("train", "dev")))
            if dev_path != path and dev_path.is_file():
                return str(dev_path)
        raise CtxError("There is no dev file in its directory.", location=self.file, hint="pass --validation_file.")
