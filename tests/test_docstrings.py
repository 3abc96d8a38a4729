"""The examples in the docstrings of the package run, and print what they show."""

import doctest
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tokenizer_texts import TEXTS
from zoo import Case

import hf_ctxmodels
from hf_ctxmodels.conversion.word_vectors import WordVectors
from hf_ctxmodels.data.news_files import EXAMPLE_ARTICLE
from hf_ctxmodels.objectives.masked_lm import MaskedLM
from hf_ctxmodels.registry import FAMILIES

PACKAGES = sorted(module.name for module in pkgutil.iter_modules(hf_ctxmodels.__path__) if module.ispkg)
SAVED_MODELS = {"WordEncoder", "embed_words", "CtxSentenceEncoder", "Predictor", "ClassifierGuidance"}
"""Examples that open a model of the Hub or a saved one."""
OPTIONAL_PACKAGES = {"numba", "triton"}
OBJECTIVES = {name: family for family in FAMILIES.values() for name in family.objective_classes.values()}
BILINGUAL = {"back_translation", "cross_lingual", "sentence_tasks", "translation"}
"""Modules of objectives of translations."""
HEADS = {
    "ContinuationScorer": ("gpt2", "AutoModelForCausalLM"),
    "Objective": ("bert", "AutoModelForPreTraining"),
    "WordSpace": ("word2vec", "AutoModel"),
}
FILES = {
    "phrases.txt": "a small boat\nold window\n",
    "news.jsonl": EXAMPLE_ARTICLE + "\n",
    "train.en": "a small boat\n",
    "train.de": "ein kleines Boot\n",
}


class Checker(doctest.OutputChecker):
    """Accepts all output if an example shows none."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


class Names(dict[str, Any]):
    """Names of the module of an example, of the package, and a model, its tokenizer and a batch if they are used."""

    def __init__(self, example: doctest.DocTest) -> None:
        super().__init__(example.globs)
        name = example.name.rpartition(".")[2]
        family, self.head = HEADS.get(name, ("bert", "AutoModel"))
        self.is_bilingual = example.name.split(".")[-2] in BILINGUAL
        self.family = OBJECTIVES.get(name, FAMILIES[family])

    def __missing__(self, name: str) -> Any:
        if name == "tokenizer":
            texts = [f"<en> {text}\t<de> {text}" for text in TEXTS] if self.is_bilingual else TEXTS
            texts = [*texts, *["king man woman"] * 9]
            value: Any = self.family.tokenizer.train(texts, 400, model_max_length=2000)
        elif name == "model":
            value = Case(self.family, self.head).model(vocab_size=len(self["tokenizer"]))
        elif name == "batch":
            value = self["tokenizer"](["a cat"], return_tensors="pt")
        elif name in ("WordVectors", "MaskedLM"):
            value = {"WordVectors": WordVectors, "MaskedLM": MaskedLM}[name]
        elif name in hf_ctxmodels.__all__:
            value = getattr(hf_ctxmodels, name)
        else:
            raise KeyError(name)
        self[name] = value
        return value


def find_examples(package_name: str) -> Iterator[doctest.DocTest]:
    """The examples of a package that open no saved model."""
    package = import_module(f"hf_ctxmodels.{package_name}")
    names = [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    for name in [package.__name__, *names]:
        try:
            module = import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in OPTIONAL_PACKAGES:
                raise
            continue
        for example in doctest.DocTestFinder(exclude_empty=True).find(module):
            if example.examples and example.name.rpartition(".")[2] not in SAVED_MODELS:
                yield example


@pytest.mark.parametrize("package", PACKAGES)
def test_examples(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    runner = doctest.DocTestRunner(Checker(), optionflags=doctest.NORMALIZE_WHITESPACE)
    for example in find_examples(package):
        with subtests.test(example=example.name):
            example.globs = Names(example)
            lines: list[str] = []
            assert not runner.run(example, out=lines.append).failed, "".join(lines)
