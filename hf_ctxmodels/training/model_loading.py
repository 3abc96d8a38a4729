"""Loading of configurations, tokenizers and models for the commands, with helpful errors."""

import copy
import dataclasses
import json
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate import PartialState, init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from hf_ctxmodels.architectures.character_models import CharacterPreTrainedModel
from hf_ctxmodels.architectures.configurations import CtxCharacterConfig
from hf_ctxmodels.core.config import CtxConfig
from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.constants import MULTITASK_MODEL_TYPE
from hf_ctxmodels.core.errors import CtxError, hint_for_error, wrap_errors
from hf_ctxmodels.core.loading import read_json, require_existing_path
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.core.output_files import VOCABULARY_FILES
from hf_ctxmodels.core.weights import is_quantized
from hf_ctxmodels.registry import FAMILIES, head_class
from hf_ctxmodels.spec import FamilySpec
from hf_ctxmodels.training.checkpoint_files import MANIFEST_FILE, damaged_files, list_checkpoints
from hf_ctxmodels.training.sharded_checkpoints import is_sharded

_COPY_AGAIN = "copy or download the file again, or use the weights of a checkpoint-<step> directory next to it."
# classes that transformers lacks, or that have no fast tokenizer or no padding token there -> family with the same ids
_FAMILY_TOKENIZERS = {"ErnieTokenizer": "ernie", "OpenAIGPTTokenizer": "gpt", "XLMTokenizer": "xlm"}
_WRAPPER_PREFIX = "module."  # of the weights of a model in DataParallel or DistributedDataParallel
_CORRECT_FIELD = "correct the field, or start from a named size."


@contextmanager
def _wrap_library_errors(message: str, source: str | Path, hint: str) -> Iterator[None]:
    """Convert any error of a library, which may depend on any content of a file, to a CtxError."""
    try:
        yield
    except CtxError:
        raise
    except Exception as error:
        # configuration classes wrap the errors of their validators
        cause = (error.__cause__ if isinstance(error, StrictDataclassError) else None) or error
        first_line = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        raise CtxError(f"{message}: {first_line}", location=str(source), hint=hint_for_error(error, hint)) from error


def check_source(source: str | Path, names: Sequence[str] = ()) -> None:
    """Raise CtxError as `require_existing_path`, or if a directory has checkpoints of an unfinished run, and neither a
    model nor one of the named files."""
    require_existing_path(source)
    directory = Path(source)
    is_complete = any((directory / name).is_file() for name in ("config.json", *names))
    if is_complete or not (checkpoints := list_checkpoints(directory)):
        return
    raise CtxError(
        "The directory has checkpoints of an unfinished run, and no model.",
        location=str(source),
        hint=f"use {checkpoints[-1]}, or run the command of the run again with --resume to continue it, or with "
        "--resume finish to end it there.",
    )


def check_sources(sources: Iterable[str | Path]) -> None:
    """Raise CtxError as `check_source`; to be called before the first of several models is loaded."""
    for source in sources:
        check_source(source)


def load_config(
    source: str | Path,
    config_class: type[PreTrainedConfig] | type[AutoConfig] = AutoConfig,
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> PreTrainedConfig:
    """The configuration of a checkpoint directory or Hub id, with `changes` of its fields.

    A family's `config_class` also opens reference checkpoints. Raises CtxError if there is no such checkpoint, its
    `config.json` is unusable, or a field is unknown.
    """
    check_source(source)
    directory = Path(source)
    has_config = (directory / "config.json").is_file()
    if (directory / "adapter_config.json").is_file() and not has_config:
        raise CtxError(
            "The directory has an adapter, and no model.",
            location=str(source),
            hint="merge an adapter of PEFT with its model (merge_and_unload) and save the result; load a bottleneck "
            "adapter with hf_ctxmodels.downstream.adapters.load_adapter.",
        )
    if (directory / "tokenizer_config.json").is_file() and not has_config:
        raise CtxError(
            "The directory has a tokenizer, and no model.",
            location=str(source),
            hint="use a directory written by `hf-ctxmodels pretrain` or `finetune`, or a Hub id.",
        )
    hint = "use a directory with a config.json, or a Hub id."
    with suppress(CtxError):
        fields = read_json(directory / "config.json") if has_config else None
        if isinstance(fields, dict) and "model_type" not in fields:
            hint = 'add "model_type": "bert", or the type of its family, to config.json.'
    with _wrap_library_errors("No usable model configuration", source, hint):
        return change_config(config_class.from_pretrained(source), changes, source)


def change_config(config: PreTrainedConfig, changes: Mapping[str, Any], source: str | Path) -> PreTrainedConfig:
    """The configuration with replaced fields; raises CtxError for an unknown field or an invalid value."""
    for name, value in changes.items():
        if not hasattr(config, name):
            raise CtxError(
                f"{type(config).__name__} has no field {name}.",
                location=str(source),
                hint=f"use one of {', '.join(sorted(item.name for item in dataclasses.fields(config)))}.",
            )
        with _wrap_library_errors(f"{type(config).__name__} cannot have {name}={value!r}", source, "change the value."):
            setattr(config, name, value)
    if isinstance(config, CtxConfig):
        with _wrap_library_errors(f"The fields of {type(config).__name__} do not fit together", source, _CORRECT_FIELD):
            config.validate()
    return config


def load_family_config(source: str | Path) -> PreTrainedConfig:
    """The configuration of a checkpoint, or of a reference checkpoint, as a family's class; raises CtxError as
    `load_config`, or if the model belongs to no family."""
    config = load_config(source)
    if any(type(config) is family.config for family in FAMILIES.values()):
        return config
    if (family := _family_of_reference(config)) is not None:
        return load_config(source, family.config)
    raise CtxError(
        f"A model with a {type(config).__name__} belongs to no family.",
        location=str(source),
        hint=f"use a model of one of: {', '.join(FAMILIES)}.",
    )


def _family_of_reference(config: PreTrainedConfig) -> FamilySpec | None:
    """The first family that loads reference checkpoints with this configuration; None if there is none."""
    families = (family for family in FAMILIES.values() if config.model_type in family.config.reference_model_types)
    return next(families, None)


def convert_reference_config(config: PreTrainedConfig, auto_class: str, source: str | Path) -> PreTrainedConfig:
    """The configuration of a reference checkpoint as its family's class, whose models have the same outputs and are
    faster.

    It is returned unchanged if the family does not support the head `auto_class` or an option, the checkpoint is
    quantized, or the model needs the language of each text.

    Args:
        config: The configuration that `load_config` returns for `source`; one of this package is returned unchanged.
    """
    family = _family_of_reference(config)
    if family is not None and auto_class in family.models and not hasattr(config, "quantization_config"):
        with suppress(CtxError):
            family_config = load_config(source, family.config)
            if not getattr(family_config, "needs_languages", False):
                return family_config
    return config


def load_config_file(
    config_class: type[PreTrainedConfig], file: str | Path, changes: Mapping[str, Any] = MappingProxyType({})
) -> PreTrainedConfig:
    """A configuration from a JSON file of the class's fields, with `changes`; raises CtxError if the file is missing,
    no JSON, or no configuration of this class."""
    if not Path(file).exists():
        raise CtxError("No such configuration file.", location=str(file), hint="check --config.")
    with _wrap_library_errors(f"Not a configuration of {config_class.__name__}", file, _CORRECT_FIELD):
        fields = json.loads(Path(file).read_text(encoding="utf-8"))
        fields = {name: value for name, value in fields.items() if name != "architectures"}
    return make_config(config_class, {**fields, **changes}, location=str(file))


def parse_config_options(assignments: Sequence[str]) -> dict[str, Any]:
    """`["hidden_dropout_prob=0", "hidden_act=relu"]` as `{"hidden_dropout_prob": 0, "hidden_act": "relu"}`."""
    fields = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not (name and equals):
            raise CtxError(f"{assignment!r} is not key=value.", location="--config_options", hint="use key=value.")
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value  # a plain word
    return fields


def make_config(config_class: type[PreTrainedConfig], fields: Mapping[str, Any], *, location: str) -> PreTrainedConfig:
    """A configuration with fields from the file or flags `location`; raises CtxError if they are unknown or invalid."""
    with _wrap_library_errors(f"Not a configuration of {config_class.__name__}", location, _CORRECT_FIELD):
        return config_class(**fields)


def new_config(
    family: FamilySpec, tokenizer: PreTrainedTokenizerBase, size: str | None = None, options: Sequence[str] = ()
) -> PreTrainedConfig:
    """The configuration of a new model, with vocabulary size and special token ids of its tokenizer.

    `size` is a size of the family (by default "tiny") or a JSON file of fields, and `options` are fields to change, as
    key=value. Raises CtxError if they are unknown or invalid.
    """
    changes, size = parse_config_options(options), size or "tiny"
    if size.endswith(".json"):
        return load_config_file(family.config, size, changes)
    if size not in family.sizes:
        raise CtxError(
            f"The family {family.name} has no size {size!r}.",
            location="--config",
            hint=f"use one of {', '.join(family.sizes)}, or a .json file.",
        )
    defaults = family.config()
    multiple = defaults.vocab_size_multiple  # type: ignore[attr-defined]
    vocabulary = {"vocab_size": -(-len(tokenizer) // multiple) * multiple, "pad_token_id": tokenizer.pad_token_id}
    # BERT's tokenizer has [CLS] and [SEP] instead of tokens for the begin and the end of a sequence
    for name, substitute in (("bos_token_id", "cls_token_id"), ("eos_token_id", "sep_token_id")):
        if getattr(defaults, name) is not None:
            token_id = getattr(tokenizer, name)
            vocabulary[name] = getattr(tokenizer, substitute) if token_id is None else token_id
    if family.seq2seq_finetuning is not None:
        # token ids that the head generates with; a head whose tokenizer lacks one refuses to generate
        with suppress(CtxError):
            vocabulary |= family.seq2seq_finetuning.objective.head_fields(tokenizer)
    fields = {**family.sizes[size], **vocabulary, **changes}
    return make_config(family.config, fields, location=" ".join([size, *options]))


def set_embedding_fields(config: PreTrainedConfig) -> None:
    """Set the fields that follow from `pretrained_embeddings`, if any; raises CtxError if they cannot be opened."""
    if isinstance(config, CtxCharacterConfig) and config.pretrained_embeddings and not config.pretrained_embedding_size:
        for name, value in CharacterPreTrainedModel.embedding_fields(config.pretrained_embeddings).items():
            setattr(config, name, value)


def new_model(auto_class: str, config: PreTrainedConfig) -> PreTrainedModel:
    """A new model with the head of an Auto class, and the pretrained components that its configuration names."""
    set_embedding_fields(config)
    model = _empty_model(auto_class, config)
    if isinstance(model, CtxPreTrainedModel):
        model.load_pretrained_components()
    return model


def _empty_model(auto_class: str, config: PreTrainedConfig) -> PreTrainedModel:
    model_class = head_class(auto_class, config)
    return (
        model_class._from_config(config)
        if issubclass(model_class, PreTrainedModel)
        else model_class.from_config(config)
    )


def new_model_without_memory(auto_class: str, config: PreTrainedConfig) -> PreTrainedModel:
    """A new model whose parameters have their shapes but one element of memory each, for a process that receives shards
    of another process's weights; buffers have their values."""
    set_embedding_fields(config)
    with init_empty_weights(include_buffers=False):
        model = _empty_model(auto_class, config)
    model.tie_weights()
    placeholders: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight not in placeholders:
                # not on the meta device: accelerate identifies the parameters of an optimizer by their addresses
                memory = torch.empty(1, dtype=weight.dtype).expand(weight.shape)
                placeholders[weight] = nn.Parameter(memory, requires_grad=weight.requires_grad)
            module.register_parameter(name, placeholders[weight])
    return model


def load_tokenizer(source: str | Path, split_words: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory or Hub id; raises CtxError if it is missing, damaged, or does not use the tokenizers
    library. If inputs are lists of words (`split_words`), byte-level tokenizers add a space before each word. Without a
    padding token, as in the released GPT-2, the end of text is used, which is masked like all padding."""
    check_source(source, VOCABULARY_FILES)
    directory = Path(source)
    if directory.is_dir() and not any((directory / name).is_file() for name in VOCABULARY_FILES):
        raise CtxError(
            f"The directory contains no tokenizer: it has none of {', '.join(VOCABULARY_FILES)}.",
            location=str(source),
            hint="train one with `hf-ctxmodels data tokenizer`, or copy the missing file from the model's source.",
        )
    hint = "check the name; copy a damaged tokenizer.json again, or train a new one."
    with _wrap_library_errors("The tokenizer cannot be opened", source, hint):
        tokenizer = _open_tokenizer(source)
        if split_words and tokenizer.is_fast:
            pre_tokenizer = json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"]
            if '"add_prefix_space": false' in json.dumps(pre_tokenizer):
                tokenizer = _open_tokenizer(source, add_prefix_space=True)
    if not tokenizer.is_fast:
        raise CtxError(
            f"{type(tokenizer).__name__} has no token offsets.",
            location=str(source),
            hint="use a tokenizer with a tokenizer.json.",
        )
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    if getattr(tokenizer, "do_lower_case", False) and _has_upper_case(tokenizer):
        print(
            f"{source}: the tokenizer lower-cases text, but its vocabulary has upper-case words; if the model is "
            'cased, write {"do_lower_case": false} to tokenizer_config.json',
            file=sys.stderr,
        )
    return tokenizer


def _open_tokenizer(source: str | Path, **options: Any) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        class_name = type(tokenizer).__name__
    except Exception:
        class_name = get_tokenizer_config(source).get("tokenizer_class")
        if class_name not in _FAMILY_TOKENIZERS:
            raise
    if class_name in _FAMILY_TOKENIZERS:
        return FAMILIES[_FAMILY_TOKENIZERS[class_name]].tokenizer.from_pretrained(source, **options)
    return tokenizer


def _has_upper_case(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether at least 1% of the tokens, special tokens excluded, have an upper-case letter of ASCII."""
    tokens = tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens)
    upper_case = [token for token in tokens if re.search("[A-Z]", token) and not token.startswith("[")]
    return 100 * len(upper_case) >= len(tokens) > 0


def require_single_task(config: PreTrainedConfig, source: str) -> None:
    """Raise CtxError for the configuration of a multi-task model, where a single-task one is needed."""
    if config.model_type == MULTITASK_MODEL_TYPE:
        names = [*(getattr(config, "tasks", None) or {})] or ["NAME"]
        raise CtxError(
            f"The model has several tasks: {', '.join(names)}.",
            location=source,
            hint=f'save one task with model.task("{names[0]}").save_pretrained(DIR) and its tokenizer, and use DIR.',
        )


def verify_weights(directory: Path) -> None:
    """Compare the weights with the digests that training saved, if any; raises CtxError if they differ or cannot be
    read."""
    for file in directory.glob("*.safetensors"):
        with wrap_errors("The weights cannot be read", location=file):  # safetensors reports them as missing
            file.open("rb").close()
    damages = damaged_files(directory, "*model*.safetensors") if (directory / MANIFEST_FILE).is_file() else []
    if damages:
        raise CtxError(
            f"The weights are damaged: {'; '.join(damages)}.",
            location=str(directory / "model.safetensors"),
            hint=f"{_COPY_AGAIN} If you replaced the weights yourself, delete {directory / MANIFEST_FILE}.",
        )


def prepare_for_training(model: PreTrainedModel) -> None:
    """Convert half-precision weights, which lose small updates, to float32; raises CtxError for a quantized model,
    which has no gradients."""
    if is_quantized(model):
        raise CtxError(
            "A quantized model cannot be trained: its integer weights have no gradients.",
            location=model.config.name_or_path or None,
            hint="train the model in float32 and quantize it afterwards.",
        )
    if model.dtype in (torch.float16, torch.bfloat16):
        name = str(model.dtype).removeprefix("torch.")
        print_status(f"the weights are converted from {name} to float32 for training", PartialState().is_main_process)
        model.float()
        model.config.dtype = torch.float32


def load_model(
    source: str | Path,
    auto_class: str,
    config: PreTrainedConfig,
    *,
    weights: Mapping[str, Any] | None = None,
    require_head: bool = False,
) -> PreTrainedModel:
    """A model with the head of an Auto class, and the encoder of a directory or Hub id.

    A head that is missing in the checkpoint, or has another shape there, is newly initialized, or with `require_head`
    an error; unknown weights are ignored. Both are reported on stderr. `weights`, by name, are loaded instead of the
    source's files, which are then not verified.

    Raises:
        CtxError: There is no such model or head, the weights are damaged, or weights of the encoder or of a
            required head are missing or have another shape.
    """
    if weights is None:
        verify_weights(Path(source))
    if is_sharded(source):
        raise CtxError(
            "The checkpoint is sharded over several processes.",
            location=str(source),
            hint=f"merge it first: hf-ctxmodels convert checkpoint --checkpoint {source} --output DIR.",
        )
    hint = "use a directory with config.json and model.safetensors, or a Hub id, of a model with this head."
    with _wrap_library_errors(f"The model cannot be opened with {auto_class}", source, hint):
        model_class = head_class(auto_class, config)
        arguments: dict[str, Any] = {"pretrained_model_name_or_path": source}
        if weights is not None:
            if not issubclass(model_class, PreTrainedModel):
                model_class = model_class._model_mapping[type(config)]
            arguments = {"pretrained_model_name_or_path": None, "state_dict": dict(weights)}
        try:
            with without_load_report():
                # transformers reports missing and unexpected weights without raising
                model, report = model_class.from_pretrained(
                    **arguments, config=config, output_loading_info=True, ignore_mismatched_sizes=True
                )
        except SafetensorError as error:
            file = str(Path(source) / "model.safetensors")
            raise CtxError(f"The weights are damaged: {error}.", location=file, hint=_COPY_AGAIN) from error
    _check_encoder(model, report, source)
    if isinstance(model, CtxPreTrainedModel):
        model.load_pretrained_components(missing=set(report["missing_keys"]))
    new_weights = sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])})
    if require_head and new_weights:
        raise CtxError(
            f"The checkpoint has no head of {type(model).__name__}: {new_weights[0]} is missing.",
            location=str(source),
            hint="use a checkpoint that was saved with its head.",
        )
    for names, meaning in (
        (new_weights, "newly initialized"),
        (sorted(report["unexpected_keys"]), "ignored"),
    ):
        if names:
            shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
            print(f"{source}: {len(names)} weights {meaning}: {shown}", file=sys.stderr)
    return model


def loaded_names(model: PreTrainedModel) -> list[str]:
    """Names of the parameters that were in the checkpoint of a model, and have not been re-initialized since."""
    new_modules = tuple(f"{name}." for name in getattr(model, "newly_initialized_modules", ()))
    reinitialized = set(getattr(model, "reinitialized_weights", ()))
    return [
        name for name, _ in model.named_parameters() if not name.startswith(new_modules) and name not in reinitialized
    ]


@contextmanager
def without_load_report() -> Iterator[None]:
    """Suppress the table of missing and unexpected weights of transformers, which the caller reports.

    A filter, because a logger with a level of its own makes transformers warn about weights that tensor parallelism
    does not shard, also where it is not used.
    """
    logger = logging.getLogger("transformers.modeling_utils")

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger.addFilter(is_error)
    try:
        yield
    finally:
        logger.removeFilter(is_error)


def _check_encoder(model: PreTrainedModel, report: dict[str, Any], source: str | Path) -> None:
    """Raise CtxError if weights of the encoder are missing or have another shape; a head may be new."""
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    # checkpoints of token-level heads have no pooler, and those of an encoder alone no decoder
    optional = re.compile(r"(.*\.)?pooler\.|decoder\.")
    encoder_names = {name for name in model.state_dict() if name.startswith(prefix) and not optional.match(name)}
    mismatched = [entry for entry in report["mismatched_keys"] if entry[0].startswith(prefix)]
    missing = sorted(encoder_names & set(report["missing_keys"]))
    if not mismatched and not missing:
        return
    if mismatched:
        name, file_shape, config_shape = mismatched[0]
        problem = f"{name} is {tuple(file_shape)} in the file and {tuple(config_shape)} by the config.json"
    else:
        problem = f"{len(missing)} of {len(encoder_names)} weights of the encoder are missing, for example {missing[0]}"
    hint = "use the model.safetensors and the config.json of the same model."
    unexpected = report["unexpected_keys"]
    if unexpected and all(name.startswith(_WRAPPER_PREFIX) for name in unexpected):
        hint = f"remove the prefix {_WRAPPER_PREFIX!r} of all names in the file, or save model.module instead of model."
    raise CtxError(f"The weights do not match the configuration: {problem}.", location=str(source), hint=hint)


def new_model_with_seed(model_class: type[PreTrainedModel], config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A new model whose initial weights depend on `seed` alone; the global generators are not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` also seeds the generators of GPUs
        return model_class(copy.deepcopy(config))
