"""The test matrix: every family and Auto class in the registry, and the selections that the suites run on."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from hf_ctxmodels.registry import FAMILIES
from zoo.cases import Case, main_head


def _cases() -> list[Case]:
    """One for each model class, under the last Auto class that makes it: the first may be the general one.

    The encoder of an encoder-decoder by itself is a part of its base model, with tests of its own.
    """
    classes = {
        family.models[name]: (family, name)
        for family in FAMILIES.values()
        for name in family.models
        if name != "AutoModelForTextEncoding"
    }
    made = [Case(*row) for row in classes.values()]
    return made + [Case(family, name, False) for family in FAMILIES.values() for name in family.reference_heads]


def _representatives(heads: list[Case]) -> list[Case]:
    """The first head of each forward over each kind of encoder, and every head that pretrains its family.

    Heads bound to several families share their forward: what is a property of the head alone is tried on these.
    """
    chosen: dict[Any, Case] = {}
    for case in heads:
        forward = inspect.unwrap(case.model_class.forward)
        chosen.setdefault((forward, case.has_attention, case.is_recurrent), case)
    classes = {case.model_class for case in chosen.values()}
    classes |= {family.models[main_head(family)] for family in FAMILIES.values()}
    return [case for case in heads if case.model_class in classes]


def _architecture(case: Case) -> Any:
    """Everything that decides an encoder's outputs: its methods, and the name and type of every module."""
    model = case.model()
    modules = tuple((name, type(module)) for name, module in model.named_modules() if name)
    methods = {
        name: inspect.unwrap(member)
        for name, member in inspect.getmembers(type(model))
        if inspect.isfunction(member) and member.__module__.startswith("hf_ctxmodels.")
    }
    return methods, modules


def _architectures(base_models: list[Case]) -> list[Case]:
    """The base models of all families, except where a family shares its parent's methods and modules."""
    models = {case.family.name: case for case in base_models}
    parents = {name: models.get(case.family.parent) for name, case in models.items()}
    return [
        case
        for name, case in models.items()
        if (parent := parents[name]) is None or _architecture(case) != _architecture(parent)
    ]


def of_each_family(cases: list[Case]) -> pytest.MarkDecorator:
    """Make a test of all `cases` of a family, each of them a subtest."""
    families: dict[str, list[Case]] = {}
    for case in cases:
        families.setdefault(case.family.name, []).append(case)
    return pytest.mark.parametrize("cases", families.values(), ids=families.keys())


def all_in_one(cases: list[Case], name: str = "case") -> Callable[[Callable], Callable]:
    """Make a quick test one item, with a subtest for each of `cases`, which it takes as the argument `name`."""

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def run(*args: Any, subtests: pytest.Subtests, **fixtures: Any) -> None:
            for case in cases:
                with subtests.test(msg=str(case)):
                    test(*args, **fixtures, **{name: case})

        parameters = dict(inspect.signature(test).parameters)
        place = parameters.pop(name)
        parameters["subtests"] = place.replace(name="subtests", annotation=pytest.Subtests)
        run.__signature__ = inspect.Signature([*parameters.values()])
        return run

    return decorate


CASES = _cases()
PEERED = [case for case in CASES if case.has_reference]
BASES = [case for case in CASES if case.is_base]
HEADS = [case for case in CASES if not case.is_base]
TOKEN_HEADS = [case for case in CASES if case.has_only_token_labels]
# One head of each kind of training: one term, several terms, a state that is carried on, a text that is written, a
# generator with its discriminator, and static word vectors.
_KINDS = {
    "bert-AutoModelForMaskedLM",
    "bert-AutoModelForPreTraining",
    "ulmfit-AutoModelForCausalLM",
    "cove-AutoModelForSeq2SeqLM",
    "electra-AutoModelForPreTraining",
    "glove-AutoModelForPreTraining",
}
ARCHETYPES = [case for case in HEADS if str(case) in _KINDS]
ARCHETYPE_FAMILIES = list({case.family.name: case.family for case in ARCHETYPES}.values())
TIED_HEADS = [case for case in CASES if case.model_class._tied_weights_keys]
NETWORKS = _architectures(BASES)
REPRESENTATIVES = _representatives(HEADS)
# For what a shared forward decides alone: `head` is each of these, not every class that is bound to it.
each_forward = pytest.mark.parametrize("head_case", REPRESENTATIVES, ids=str)
