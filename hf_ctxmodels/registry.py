"""The families: validation of their specifications, look-up, and registration with transformers."""

from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module
from typing import Any

import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import USER_REGISTERED_MAPPINGS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_ctxmodels.core.auto_classes import get_auto_class, has_auto_class
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.core.remote_code import RemoteCodeStub, register_remote_code
from hf_ctxmodels.core.weights import register_conversion
from hf_ctxmodels.models import encoder_decoder
from hf_ctxmodels.models.encoder_decoder import CtxEncoderDecoderConfig
from hf_ctxmodels.spec import FamilySpec

# directories of hf_ctxmodels/models; parents precede their children
_DIRECTORIES = (
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
    "transformer_xl",
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
    """Validate specifications, and return them by name; raises CtxError with the problems of an invalid one."""
    checked: dict[str, FamilySpec] = {}
    for spec in specs:
        problems = [*_class_problems(spec), *_name_problems(spec)]
        if spec.parent is not None and spec.parent not in checked:
            problems.append(f"its parent {spec.parent!r} is not listed before it")
        for previous_spec in checked.values():
            if spec.name == previous_spec.name or spec.config.model_type == previous_spec.config.model_type:
                problems.append(
                    f"the family {previous_spec.name!r} has the same name or model_type {spec.config.model_type!r}"
                )
        if problems:
            raise CtxError("; ".join(problems) + ".", location=f"SPEC of the family {spec.name!r}")
        checked[spec.name] = spec
    return checked


def _class_problems(spec: FamilySpec) -> Iterable[str]:
    if "AutoModel" not in spec.models:
        yield "models has no 'AutoModel', the encoder"
    for auto_name, model in (*spec.models.items(), *spec.reference_heads.items(), *spec.alternative_heads.items()):
        if not has_auto_class(auto_name):
            yield f"there is no Auto class {auto_name!r}"
        if not issubclass(model, CtxPreTrainedModel) or model.config_class is not spec.config:
            yield f"{model.__name__} is not a CtxPreTrainedModel with a {spec.config.__name__}"


def _name_problems(spec: FamilySpec) -> Iterable[str]:
    for name in ("reference_heads", "alternative_heads"):
        if unknown := sorted(getattr(spec, name).keys() - spec.models.keys()):
            yield f"{name} has Auto classes that models lacks: {unknown}"
    if {"tiny", "base"} - spec.sizes.keys():
        yield "sizes lacks 'tiny' or 'base'"
    field_names = {*spec.config.__dataclass_fields__, *spec.config.attribute_map}
    used_fields = {
        **{f"sizes[{name!r}]": fields for name, fields in spec.sizes.items()},
        **{f"published[{name!r}]": published.fields for name, published in spec.published.items()},
        "traits.tiny": spec.traits.tiny,
        "traits.loss_weights": dict.fromkeys(spec.traits.loss_weights.values()),
    }
    for location, fields in used_fields.items():
        if unknown := sorted(set(fields) - field_names):
            yield f"{location} has no field of {spec.config.__name__}: {unknown}"
    class_names = {*spec.models, *(model.__name__ for model in spec.reference_heads.values())}
    for name, published in spec.published.items():
        if unknown := sorted(published.counts.keys() - class_names):
            yield f"published[{name!r}] has unknown classes: {unknown}"


FAMILIES = check_specs(import_module(f"hf_ctxmodels.models.{directory}").SPEC for directory in _DIRECTORIES)


def get_family(key: str | PreTrainedConfig | PreTrainedModel) -> FamilySpec:
    """Look up a family by its name, its `model_type`, a configuration or a model.

    A configuration must be an instance of exactly the family's class; raises CtxError if there is no such family. For
    an encoder-decoder from two models, see `encoder_decoder_spec`.
    """
    if isinstance(key, PreTrainedModel):
        key = key.config
    if key == CtxEncoderDecoderConfig.model_type:
        key = CtxEncoderDecoderConfig()
    if isinstance(key, CtxEncoderDecoderConfig):
        return encoder_decoder_spec(key)
    for family in FAMILIES.values():
        if type(key) is family.config or key in (family.name, family.config.model_type):
            return family
    if isinstance(key, PreTrainedConfig):
        raise CtxError(
            f"{type(key).__name__} (model_type {key.model_type!r}) is not a configuration of this package.",
            location=key.name_or_path or None,
            hint=f"load the model with a class of one of the families: {', '.join(FAMILIES)}.",
        )
    raise CtxError(f"There is no family {key!r}.", hint=f"use one of: {', '.join(FAMILIES)}.")


def root_family(config: PreTrainedConfig) -> str:
    """The name of the family without a parent from which a configuration's family is derived, or of the family itself;
    its `model_type` if it is of none. Models of one root family have weights with the same names and meaning."""
    try:
        family = get_family(config)
    except CtxError:
        return str(config.model_type)
    while family.parent is not None:
        family = get_family(family.parent)
    return family.name


def encoder_decoder_spec(config: CtxEncoderDecoderConfig) -> FamilySpec:
    """The specification of an encoder-decoder from two models, with the tokenizer of its encoder. It is not one of the
    `FAMILIES`: a new model is created from two checkpoints."""
    encoder, decoder = get_family(config.encoder), get_family(config.decoder)
    names = encoder.name if encoder is decoder else f"{encoder.name} and {decoder.name}"
    return replace(
        encoder,
        name="encoder_decoder",
        paper="Rothe et al. 2020, Leveraging Pre-trained Checkpoints for Sequence Generation Tasks "
        f"(arXiv 1907.12461); from {names}",
        config=CtxEncoderDecoderConfig,
        models=dict(encoder_decoder.MODELS),
        sizes={},
        published={},
        objective_classes={"back-translation": "BackTranslation"},
        seq2seq_finetuning=None,
        conversion=[],
        reference_heads={},
        alternative_heads={},
        parent=None,
    )


def checkpoint_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class from which a checkpoint was saved, or for a reference class, such as BertModel, the class of the
    family; raises CtxError if `architectures` has no class of the family."""
    family = get_family(config)
    heads = [*family.reference_heads.values(), *family.models.values(), *family.alternative_heads.values()]
    classes: dict[str, type[PreTrainedModel]] = {model.reference_class_name(): model for model in reversed(heads)}
    for model_type in family.config.reference_model_types:
        # classes of related types: DistilBertForMaskedLM is loaded by the class for BertForMaskedLM
        prefix, related_prefix = _reference_prefix(family.reference), _reference_prefix(model_type)
        classes |= {
            name.replace(prefix, related_prefix, 1): model for name, model in classes.items() if name.startswith(prefix)
        }
    classes |= {model.__name__: model for model in heads}
    for name in config.architectures or []:
        if name in classes:
            return classes[name]
    raise CtxError(
        f"architectures={config.architectures} of the configuration has no class of the family {family.name}.",
        location=config.name_or_path or None,
        hint="save the model with save_pretrained.",
    )


def _reference_prefix(model_type: str | None) -> str:
    """Common prefix of the names of a reference's classes, such as "Bert"."""
    return CONFIG_MAPPING_NAMES[model_type].removesuffix("Config") if model_type else ""


def head_class(auto_class: str, config: PreTrainedConfig) -> Any:
    """The class that creates or loads a head: the family's alternative head if `config.architectures` names it or its
    reference class, else the Auto class."""
    for family in FAMILIES.values():
        head = family.alternative_heads.get(auto_class)
        if head is None or type(config) is not family.config:
            continue
        # both heads may have the same reference class, which does not name the alternative head
        names = {head.__name__, head.reference_class_name()} - {family.models[auto_class].reference_class_name()}
        if names.intersection(config.architectures or ()):
            return head
    return get_auto_class(auto_class)


def register() -> None:
    """Register all families with the Auto classes of transformers, once; raises RuntimeError if another package has
    registered a `model_type`."""
    for family in FAMILIES.values():
        model_type = family.config.model_type
        registered = transformers.models.auto.configuration_auto.CONFIG_MAPPING._extra_content.get(model_type)
        if registered is family.config:
            continue
        if registered is not None or model_type in USER_REGISTERED_MAPPINGS:
            owner = "another package" if registered is None else f"{registered.__module__}.{registered.__qualname__}"
            raise RuntimeError(
                f"model_type {model_type!r} is already registered by {owner}. Import only one of the two packages, or "
                "rename the other's model_type."
            )
        register_conversion(model_type, family.conversion)
        register_remote_code(family.stub)
        AutoConfig.register(model_type, family.config)
        AutoTokenizer.register(family.config, tokenizer_class=family.tokenizer)
        for auto_name, model_class in family.models.items():
            get_auto_class(auto_name).register(family.config, model_class)
        causal_lm = family.models.get("AutoModelForCausalLM")
        if causal_lm is not None and getattr(causal_lm, "shifts_labels", False):
            # Trainer shifts the labels of these classes if it smooths them
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] = causal_lm.__name__
    AutoConfig.register(CtxEncoderDecoderConfig.model_type, CtxEncoderDecoderConfig, exist_ok=True)
    for auto_name, encoder_decoder_class in encoder_decoder.MODELS.items():
        getattr(transformers, auto_name).register(CtxEncoderDecoderConfig, encoder_decoder_class, exist_ok=True)
    register_remote_code(RemoteCodeStub(CtxEncoderDecoderConfig, None, encoder_decoder.MODELS))
