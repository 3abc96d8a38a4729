"""What holds for every objective: its options, its collator, and the size of its class hierarchy."""

from dataclasses import fields
from inspect import getdoc

import pytest

from hf_ctxmodels import objectives
from hf_ctxmodels.objectives import Objective
from hf_ctxmodels.registry import FAMILIES

ALL = sorted({objective for family in FAMILIES.values() for objective in family.objectives.values()}, key=str)


@pytest.mark.parametrize("objective", ALL, ids=lambda objective: objective.__name__)
def test_an_objective_is_one_dataclass_on_top_of_its_collator(objective: type[Objective]) -> None:
    own_bases = [base for base in objective.__mro__ if base.__module__.startswith("hf_ctxmodels")]
    assert len(own_bases) <= 7
    assert len({base.__module__ for base in own_bases}) <= 5
    collator = next(base for base in own_bases if base.__name__.startswith("DataCollatorFor"))
    assert issubclass(objective, Objective)
    assert not issubclass(collator, Objective)
    assert getattr(objectives, collator.__name__) is collator
    assert getattr(objectives, objective.__name__) is objective


@pytest.mark.parametrize("objective", ALL, ids=lambda objective: objective.__name__)
def test_an_objective_documents_its_options_references_relations_and_use(objective: type[Objective]) -> None:
    documentation = getdoc(objective) or ""
    for section in ("References:", "Related:", "Example:", ">>> "):
        assert section in documentation
    positions = {"tokenizer", "max_length", "seed"}
    arguments = {field.name for field in fields(objective) if field.init} - positions
    undocumented = arguments - objective.option_help().keys()
    internal = {"decoder_start_token_id", "classification_tasks", "backward", "pad_to_multiple_of"}
    assert undocumented <= internal, "options need a help text: declare them with `flag`"
