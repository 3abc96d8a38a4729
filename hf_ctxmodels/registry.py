"""The list of families, checks of their specs, look-up, and registration with the Auto classes of transformers."""

from collections.abc import Iterable
from importlib import import_module

import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import USER_REGISTERED_MAPPINGS

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.core.remote_code import register_remote_code
from hf_ctxmodels.core.weights import register_conversion
from hf_ctxmodels.objectives import Objective
from hf_ctxmodels.spec import FamilySpec

# folders of hf_ctxmodels/models, each with a SPEC; parents before children
_FOLDERS = (
    "bert",
    "ernie",
    "roberta",
    "xlm_roberta",
    "albert",
    "electra",
    "spanbert",
    "structbert",
    "unilm",
    "ernie_gen",
    "xlnet",
    "xlm",
    "gpt",
    "gpt2",
    "gpt3",
    "grover",
    "bart",
    "mass",
    "t5",
    "word2vec",
    "glove",
    "elmo",
    "cvt",
    "ulmfit",
    "seqae",
    "cove",
    "infersent",
    "laser",
    "gensen",
    "lmseq2seq",
)


def check_specs(specs: Iterable[FamilySpec]) -> dict[str, FamilySpec]:
    """Name -> spec, after checks of consistency and uniqueness.

    Raises:
        CtxError: A spec is wrong; the message names the family and the part.
    """
    checked: dict[str, FamilySpec] = {}
    for spec in specs:
        problems = [*_wrong_classes(spec), *_wrong_names(spec)]
        if spec.parent is not None and spec.parent not in checked:
            problems.append(f"its parent {spec.parent!r} is not listed before it")
        for other in checked.values():
            if spec.name == other.name or spec.config.model_type == other.config.model_type:
                problems.append(f"the family {other.name!r} has its name or model_type {spec.config.model_type!r}")
        if problems:
            raise CtxError("; ".join(problems) + ".", location=f"SPEC of the family {spec.name!r}")
        checked[spec.name] = spec
    return checked


def _wrong_classes(spec: FamilySpec) -> Iterable[str]:
    if "AutoModel" not in spec.models:
        yield "models has no 'AutoModel', the encoder"
    for auto_name, model in (*spec.models.items(), *spec.reference_heads.items()):
        if not hasattr(transformers, auto_name):
            yield f"transformers has no Auto class {auto_name!r}"
        if not issubclass(model, CtxPreTrainedModel) or model.config_class is not spec.config:
            yield f"{model.__name__} is no CtxPreTrainedModel with a {spec.config.__name__}"
    for name, objective in spec.objectives.items():
        if not issubclass(objective, Objective):
            yield f"the objective {name!r} is no Objective"


def _wrong_names(spec: FamilySpec) -> Iterable[str]:
    if spec.reference_heads.keys() - spec.models.keys():
        yield f"reference_heads names Auto classes that models does not: {sorted(spec.reference_heads.keys() - spec.models.keys())}"
    if {"tiny", "base"} - spec.sizes.keys():
        yield "sizes lacks 'tiny' or 'base'"
    known = {*spec.config.__dataclass_fields__, *spec.config.attribute_map}
    changed = {
        **{f"sizes[{name!r}]": fields for name, fields in spec.sizes.items()},
        **{f"published[{name!r}]": row.fields for name, row in spec.published.items()},
        "traits.tiny": spec.traits.tiny,
        "traits.loss_weights": dict.fromkeys(spec.traits.loss_weights.values()),
    }
    for where, fields in changed.items():
        if set(fields) - known:
            yield f"{where} has no field of {spec.config.__name__}: {sorted(set(fields) - known)}"
    names = {*spec.models, *(model.__name__ for model in spec.reference_heads.values())}
    for name, row in spec.published.items():
        if row.counts.keys() - names:
            yield f"published[{name!r}] has unknown classes: {sorted(row.counts.keys() - names)}"


FAMILIES = check_specs(import_module(f"hf_ctxmodels.models.{folder}").SPEC for folder in _FOLDERS)


def get_family(key: str | PreTrainedConfig | PreTrainedModel) -> FamilySpec:
    """Look up a family by its name, its `model_type`, a configuration or a model.

    A configuration must have exactly the family's class: subclasses and configurations of the reference implementation
    do not match.

    Raises:
        CtxError: There is no such family; the message lists all families.
    """
    if isinstance(key, PreTrainedModel):
        key = key.config
    for family in FAMILIES.values():
        if type(key) is family.config or key in (family.name, family.config.model_type):
            return family
    if isinstance(key, PreTrainedConfig):
        raise CtxError(
            f"{type(key).__name__} (model_type {key.model_type!r}) is no configuration of this package.",
            location=key.name_or_path or None,
            hint=f"open the model with a class of one of the families: {', '.join(FAMILIES)}.",
        )
    raise CtxError(f"There is no family {key!r}.", hint=f"use one of: {', '.join(FAMILIES)}.")


def checkpoint_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that a checkpoint was saved from.

    Raises:
        CtxError: Its configuration is of no family, or names no class of it.
    """
    family = get_family(config)
    known = {model.__name__: model for model in (*family.models.values(), *family.reference_heads.values())}
    for name in config.architectures or []:
        if name in known:
            return known[name]
    raise CtxError(
        f"The configuration names none of the classes of {family.name}: architectures is {config.architectures}.",
        location=config.name_or_path or None,
        hint="save the model by save_pretrained.",
    )


def register() -> None:
    """Register all families with the Auto classes of transformers; idempotent.

    Raises:
        RuntimeError: A family's `model_type` is already registered by another package.
    """
    for family in FAMILIES.values():
        model_type = family.config.model_type
        known = transformers.models.auto.configuration_auto.CONFIG_MAPPING._extra_content.get(model_type)
        if known is family.config:
            continue
        if known is not None or model_type in USER_REGISTERED_MAPPINGS:
            owner = "another package" if known is None else f"{known.__module__}.{known.__qualname__}"
            raise RuntimeError(
                f"model_type {model_type!r} is already registered by {owner}. Import only one of the two packages, or "
                "rename the other's model_type."
            )
        register_conversion(model_type, family.conversion)
        register_remote_code(family.stub)
        AutoConfig.register(model_type, family.config)
        AutoTokenizer.register(family.config, tokenizer_class=family.tokenizer)
        for auto_name, model_class in family.models.items():
            getattr(transformers, auto_name).register(family.config, model_class)
