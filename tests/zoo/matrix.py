"""The test matrix: all families and Auto classes of the registry, and selections for expensive tests."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_ctxmodels.registry import FAMILIES
from zoo.cases import Case, pretraining_auto_class


def _cases() -> list[Case]:
    """One case for each model class, with the most specific (last) Auto class that opens it.

    The separate encoder of T5 is part of its base model, and tested in tests/models/test_t5.py. The logits of a parser
    have an axis of words, and depend on the padding; tests/models/test_cvt_parsing.py tests them.
    """
    classes = {
        family.models[name]: (family, name)
        for family in FAMILIES.values()
        for name in family.models
        if name not in ("AutoModelForTextEncoding", "AutoModelForDependencyParsing")
    }
    cases = [Case(*entry) for entry in classes.values()]
    return cases + [Case(family, name, False) for family in FAMILIES.values() for name in family.reference_heads]


def _representatives(heads: list[Case]) -> list[Case]:
    """The first head with each forward on each type of network, and the pretraining heads of all families.

    Heads of several families share their forward: these represent them in the tests of the head.
    """
    first_cases: dict[Any, Case] = {}
    for case in heads:
        forward = inspect.unwrap(case.model_class.forward)
        first_cases.setdefault((forward, case.has_attention, case.is_recurrent), case)
    classes = {case.model_class for case in first_cases.values()}
    classes |= {family.models[pretraining_auto_class(family)] for family in FAMILIES.values()}
    return [case for case in heads if case.model_class in classes]


def _architecture(case: Case) -> Any:
    """The methods of a base model, and the names and types of its modules; together they determine its outputs."""
    with torch.device("meta"):
        model = case.model_class(case.config())
    modules = tuple((name, type(module)) for name, module in model.named_modules() if name)
    methods = {
        name: inspect.unwrap(member)
        for name, member in inspect.getmembers(type(model))
        if inspect.isfunction(member) and member.__module__.startswith("hf_ctxmodels.")
    }
    return methods, modules


def _architectures(base_models: list[Case]) -> list[Case]:
    """The base models of all families, except those with the methods and modules of their parent family."""
    models = {case.family.name: case for case in base_models}
    parents = {name: models.get(case.family.parent) for name, case in models.items()}
    return [
        case
        for name, case in models.items()
        if (parent := parents[name]) is None or _architecture(case) != _architecture(parent)
    ]


def grouped_by_family(cases: list[Case]) -> pytest.MarkDecorator:
    """Parametrize a test by family: its argument `cases` are the cases of a family."""
    families: dict[str, list[Case]] = {}
    for case in cases:
        families.setdefault(case.family.name, []).append(case)
    return pytest.mark.parametrize("cases", families.values(), ids=families.keys())


def as_subtests(cases: list[Case], name: str = "case") -> Callable[[Callable], Callable]:
    """Parametrize a quick test by family, with a subtest for each case, which is its argument `name`."""

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def run(*args: Any, cases: list[Case], subtests: pytest.Subtests, **fixtures: Any) -> None:
            for case in cases:
                with subtests.test(msg=str(case)):
                    test(*args, **fixtures, **{name: case})

        parameters = dict(inspect.signature(test).parameters)
        del parameters[name]
        for fixture in ("cases", "subtests"):
            parameters[fixture] = inspect.Parameter(fixture, inspect.Parameter.KEYWORD_ONLY)
        run.__signature__ = inspect.Signature([*parameters.values()])
        return grouped_by_family(cases)(run)

    return decorate


CASES = _cases()
REFERENCE_CASES = [case for case in CASES if case.has_reference]
BASES = [case for case in CASES if case.is_base]
HEADS = [case for case in CASES if not case.is_base]
# heads with one label per token as their only target, whose examples can be packed
TOKEN_HEADS = [case for case in CASES if case.auto_name in ("AutoModelForMaskedLM", "AutoModelForTokenClassification")]
# One head for each type of training: one loss, several losses, state across batches, sequence to sequence, generator
# and discriminator, and static word embeddings.
_ARCHETYPE_NAMES = {
    "bert-AutoModelForMaskedLM",
    "bert-AutoModelForPreTraining",
    "ulmfit-AutoModelForCausalLM",
    "cove-AutoModelForSeq2SeqLM",
    "electra-AutoModelForPreTraining",
    "glove-AutoModelForPreTraining",
}
ARCHETYPES = [case for case in HEADS if str(case) in _ARCHETYPE_NAMES]
ARCHETYPE_FAMILIES = list({case.family.name: case.family for case in ARCHETYPES}.values())
TIED_HEADS = [case for case in CASES if case.model_class._tied_weights_keys]
NETWORKS = _architectures(BASES)
REPRESENTATIVES = _representatives(HEADS)
# Parametrizes a test of the heads by one case for each forward.
parametrize_forwards = pytest.mark.parametrize("head_case", REPRESENTATIVES, ids=str)
