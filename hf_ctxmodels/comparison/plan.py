"""The plan of a comparison: families and variants, text, budgets, seeds and measures, read from a YAML file."""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_origin

from hf_ctxmodels.comparison.measures import COST, MEASURES, DataFile, Measure
from hf_ctxmodels.core.command_line import find_packaged, parse_arguments, read_recipe, recipe_flags, shown_fields
from hf_ctxmodels.core.constants import MAX_SEED
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import (
    REQUIRED,
    convert,
    did_you_mean,
    field_default,
    is_settable,
    join_choice,
    split_choice,
)
from hf_ctxmodels.core.paths import is_url
from hf_ctxmodels.core.yaml_mapping import YamlMapping
from hf_ctxmodels.data.files import describe_content, is_pattern, match_files, split_dataset_options
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import FamilySpec
from hf_ctxmodels.tokenizers.word_level import CtxWordTokenizer
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.pretraining import PretrainingArguments

BUDGETS = ("words", "flops", "minutes")
PLAN_KEYS = (
    *("dataset", "validation_fraction", "vocab_size", "word_vocab_size", "tokenizer_bytes", "budget", "checkpoints"),
    *("seeds", "pretraining", "families", "variants", "contrasts", "measures", "accelerate"),
)
_VARIANT_KEYS = ("family", "recipe", "vocab_size")
# flags of pretrain that the plan sets
_PLANNED_FLAGS = (
    *("dataset", "tokenizer", "validation_fraction", "model", "family", "seed", "max_steps", "num_train_epochs"),
    *("output_dir", "resume", "overwrite", "save_steps", "save_total_limit", "save_at", "eval_steps", "logging_steps"),
    *("streaming", "report_to"),
)


@dataclass(frozen=True)
class Variant:
    """A row of the comparison: a family with its pretraining recipe.

    Attributes:
        recipe: Flags of `pretrain` and their values as strings, without the flags that the plan sets.
        vocab_size: Vocabulary size of its tokenizer; None for the plan's.
    """

    name: str
    family: str
    recipe: Mapping[str, Any]
    vocab_size: int | None = None

    @property
    def spec(self) -> FamilySpec:
        """The family."""
        return FAMILIES[self.family]

    @property
    def objective(self) -> str:
        """Name of the objective."""
        value = self.recipe.get("objective") or next(iter(self.spec.objectives), "")
        return next(iter(value)) if isinstance(value, dict | list) else split_choice(value)[0]

    @property
    def tokenizer_kind(self) -> str:
        """The first family with the same kind of tokenizer, whose tokenizer all of them share."""
        shared_class = tokenizer_class(self.spec)
        return next(name for name, spec in FAMILIES.items() if tokenizer_class(spec) is shared_class)


@dataclass(frozen=True)
class Run:
    """A pretraining run: a variant with a budget and a seed.

    Attributes:
        budget: Kind of budget: words, flops or minutes.
        digest: Digest of the recipe and its files, the budget, the seed, the tokenizer and the text.
    """

    variant: Variant
    budget: str
    seed: int
    digest: str

    @property
    def name(self) -> str:
        """Relative directory of the run."""
        return f"{self.budget}/{self.variant.name}-{self.seed}-{self.digest}"


@dataclass(kw_only=True)
class Plan:
    """A plan, see `read_plan`.

    Attributes:
        dataset: Sources of the text, as in pretrain.
        vocab_size, word_vocab_size: Vocabulary sizes of tokenizers of subwords and of words.
        tokenizer_bytes: Bytes of the sample of text that tokenizers are trained on; None for all.
        budget: Kind of budget (words, flops, minutes) -> its size; each kind has separate runs.
        checkpoints: Number of evaluated checkpoints of a run, each at twice the steps of the previous one, in addition
            to the initial weights.
        contrasts: Description -> two variants, whose differences with the same seed are a table.
        excluded: Family -> why it is not compared.
        accelerate: Flags of `accelerate launch`; None to start pretrain directly.
    """

    dataset: list[str]
    validation_fraction: float
    vocab_size: int
    word_vocab_size: int
    tokenizer_bytes: int | None
    budget: dict[str, float]
    checkpoints: int
    seeds: list[int]
    variants: list[Variant]
    contrasts: dict[str, tuple[str, str]] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)
    measures: list[Measure]
    accelerate: dict[str, str] | None

    def check_measures(self) -> None:
        """Read the files of all measures, before any work; raises CtxError for an invalid file, column or option."""
        for measure in self.measures:
            with located_errors(f"measures.{measure.name}"):
                measure.check()

    def runs(self) -> Iterator[Run]:
        """All runs in the order of execution: by seed, so that an interrupted comparison is complete for the first
        seeds."""
        content = [describe_content(source) for source in self.dataset]
        for seed in self.seeds:
            for budget, size in self.budget.items():
                for variant in self.variants:
                    identity = {
                        **self.recipe_identity(variant),
                        "seed": seed,
                        "budget": [budget, size],
                        "checkpoints": self.checkpoints,
                        "tokenizer": self.tokenizer_identity(variant),
                        "dataset": content,
                    }
                    yield Run(variant, budget, seed, digest(identity))

    def recipe_identity(self, variant: Variant) -> dict[str, Any]:
        """The recipe of a variant and the content of its files, such as a configuration, as JSON values."""
        flags = [*recipe_argv(variant.recipe, variant.name), *(self.accelerate or {}).values()]
        words = {word for flag in flags for word in (flag, *re.split("[:=,]", flag))}
        files = [describe_content(word) for word in sorted(words) if os.path.isfile(word)]
        identity = {"recipe": variant.recipe, "family": variant.family, "accelerate": self.accelerate}
        return identity | ({"files": files} if files else {})

    def tokenizer_identity(self, variant: Variant) -> dict[str, Any]:
        """Settings and text of a variant's tokenizer, as JSON values, for its digest."""
        return {
            "kind": variant.tokenizer_kind,
            "vocab_size": self.tokenizer_size(variant),
            "dataset": [describe_content(source) for source in self.dataset],
            "validation_fraction": self.validation_fraction,
            "sample_bytes": self.tokenizer_bytes,
        }

    def tokenizer_size(self, variant: Variant) -> int:
        """Vocabulary size of the tokenizer of a variant."""
        if variant.vocab_size is not None:
            return variant.vocab_size
        has_words = issubclass(variant.spec.tokenizer, CtxWordTokenizer)
        return self.word_vocab_size if has_words else self.vocab_size


def digest(value: Any) -> str:
    """A short digest of a JSON value."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()


def tokenizer_class(spec: FamilySpec) -> type:
    """The class that trains the tokenizer of a family, without subclasses that change nothing."""
    cls: type = spec.tokenizer
    while all(name.startswith("__") or name == "slow_tokenizer_class" for name in vars(cls)):
        cls = cls.__mro__[1]
    return cls


def exclusion_reason(spec: FamilySpec) -> str | None:
    """Why a family cannot be pretrained on raw text; None if it can."""
    if not spec.objectives:
        return "it is trained on labeled examples only"
    objective = next(iter(spec.objectives))
    return f"its objective {objective} needs translations" if spec.objectives[objective].requires_translations else None


def read_plan(file: str | Path, folder: str | Path = ".") -> Plan:
    """Read a plan.

    Args:
        file: YAML file, or the name of a packaged plan.
        folder: Directory that relative paths of the plan refer to.

    Raises:
        CtxError: The file is invalid: an unknown key, family, flag, measure or budget, or a missing file.
    """
    path = find_packaged(str(file), "comparisons", "plan", "--plan")
    root = YamlMapping.from_file(path, "plan", PLAN_KEYS)
    for key in ("dataset", "vocab_size", "budget", "measures"):
        if key not in root.nodes:
            raise CtxError(f"The plan lacks {key}.", location=path, hint=f"add {key}, as in the packaged plans.")
    sources = root.text("dataset")
    dataset = [
        _located_source(source, Path(folder), root.location("dataset"))
        for source in ([sources] if isinstance(sources, str) else sources)
    ]
    vocab_size = root.value("vocab_size", int)
    plan = Plan(
        dataset=dataset,
        validation_fraction=root.value("validation_fraction", float, 0.02),
        vocab_size=vocab_size,
        word_vocab_size=root.value("word_vocab_size", int, vocab_size),
        tokenizer_bytes=root.value("tokenizer_bytes", int | None),
        budget=_read_budget(root),
        checkpoints=root.value("checkpoints", int, 4),
        seeds=_read_seeds(root),
        variants=[],
        measures=_read_measures(root, Path(folder)),
        accelerate=_read_accelerate(root),
    )
    if not 1 <= plan.checkpoints <= 20:
        message = f"Expected 1 to 20 checkpoints, got {plan.checkpoints}."
        raise root.error("checkpoints", message, "change the number.")
    if not 0 < plan.validation_fraction < 1:
        message = "The held-out fraction is between 0 and 1."
        raise root.error("validation_fraction", message, "use, for example, 0.02.")
    plan.variants, plan.excluded = _read_variants(root, path)
    plan.contrasts = _read_contrasts(root, [variant.name for variant in plan.variants])
    return plan


def _located_source(source: str, folder: Path, location: str) -> str:
    """A source of text, relative to the folder if it is a file, a directory or a pattern; raises CtxError if there is
    none."""
    name, options = split_dataset_options(source)
    is_file = (folder / name).exists() or (not options and (is_pattern(name) or Path(name).suffix))
    if source == "demo" or is_url(name) or not is_file:
        return source  # also a Hub id
    _existing_files(name, folder, location)
    return join_choice(str(folder / name), options)


def _read_accelerate(root: YamlMapping) -> dict[str, str] | None:
    """The flags of `accelerate launch`; raises CtxError if the configuration file is missing."""
    if "accelerate" not in root.nodes:
        return None
    flags = root.text("accelerate")
    if not isinstance(flags, dict) or not all(isinstance(value, str) for value in flags.values()):
        raise root.error("accelerate", "accelerate is not a mapping of values.", "write {config_file: FILE}.")
    if (file := flags.get("config_file")) is not None and not Path(file).is_file():
        raise root.error("accelerate", f"There is no file {file}.", "correct config_file.")
    return flags


def _read_budget(root: YamlMapping) -> dict[str, float]:
    mapping = root.mapping("budget", "the budget", BUDGETS)
    budget = {name: mapping.value(name, float) for name in mapping.nodes}
    if not budget:
        raise root.error("budget", "The budget is empty.", f"use {', '.join(BUDGETS)}.")
    for name, size in budget.items():
        if not 0 < size < float("inf"):
            raise mapping.error(name, f"The budget of {name} is {size}.", "use a number above 0.", "budget.")
    return budget


def _read_seeds(root: YamlMapping) -> list[int]:
    texts = root.text("seeds") if "seeds" in root.nodes else ["0"]
    seeds = [int(text) for text in texts if str(text).isdecimal()] if isinstance(texts, list) else []
    if not seeds or len(set(seeds)) < len(texts) or max(seeds) > MAX_SEED:
        message = f"Expected different seeds from 0 to {MAX_SEED}, got {texts}."
        raise root.error("seeds", message, "give a list such as [0, 1, 2].")
    return seeds


def _read_variants(root: YamlMapping, path: Path) -> tuple[list[Variant], dict[str, str]]:
    """The variants of the plan, and the families that are excluded, with reasons."""
    shared = root.text("pretraining") if "pretraining" in root.nodes else {}
    entries: dict[str, Any] = root.text("variants") if "variants" in root.nodes else {}
    names = root.text("families") if "families" in root.nodes else []
    for key, value in (("pretraining", shared), ("variants", entries)):
        if not isinstance(value, dict):
            raise root.error(key, f"{key} is not a mapping.", "write `name: value` lines.")
    if isinstance(names, list) and not all(isinstance(name, str) for name in names):
        raise root.error("families", f"Expected a list of families, got {names}.", "write [bert, gpt2].")
    if names == "all":
        names = [name for name in FAMILIES if name not in entries]
        reasons = {name: exclusion_reason(FAMILIES[name]) for name in names}
    else:
        names = [names] if isinstance(names, str) else names
        reasons = dict.fromkeys(names)
    excluded = {name: reason for name, reason in reasons.items() if reason is not None}
    options = {name: entries.get(name) or {} for name in [*names, *entries] if name not in excluded}
    # the order of the registry, then variants with other names
    order = [name for name in FAMILIES if name in options]
    order += [name for name in options if name not in order]
    if not order:
        raise CtxError("The plan has no family.", location=path, hint="add `families: all`, or a list of families.")
    variants = []
    for name in order:
        with located_errors(f"{path}, {name}"):
            variants.append(_make_variant(name, options[name], shared))
    return variants, excluded


def _read_contrasts(root: YamlMapping, variants: Sequence[str]) -> dict[str, tuple[str, str]]:
    """The contrasts of the plan; raises CtxError for an entry that is not a list of two variants."""
    if "contrasts" not in root.nodes:
        return {}
    mapping = root.mapping("contrasts", "the contrasts")
    contrasts = {}
    for description in mapping.nodes:
        names = mapping.text(description)
        if not (isinstance(names, list) and len(names) == 2 and all(name in variants for name in names)):
            message = f"Expected a list of two variants, got {names}."
            raise mapping.error(description, message, f"use two of: {', '.join(variants)}.", "contrasts.")
        contrasts[description] = names[0], names[1]
    return contrasts


@contextmanager
def located_errors(location: str) -> Iterator[None]:
    """Add a location, such as an entry of the plan or a run, before the location of an error."""
    try:
        yield
    except CtxError as error:
        inner = f", {error.location}" if error.location else ""
        raise CtxError(error.message, location=f"{location}{inner}", hint=error.hint) from error


def _check_name(name: str, description: str) -> None:
    """Raise CtxError for a name that is not a part of file names and of patterns of files."""
    if not re.sub("[-_.]", "", name).isalnum():
        hint = "use letters, digits, `-`, `_` and `.`."
        raise CtxError(f"{name!r} is not a valid name of a {description}.", hint=hint)


def _make_variant(name: str, options: Any, shared: Mapping[str, Any]) -> Variant:
    """A variant from its entry in the plan; raises CtxError if `pretrain` would not accept it."""
    if not isinstance(options, dict):
        raise CtxError(f"Expected flags of pretrain, got {options!r}.", hint="write `flag: value` lines.")
    _check_name(name, "variant")
    family = str(options.get("family", name))
    if family not in FAMILIES:
        raise CtxError(
            f"Unknown family {family!r}.",
            hint=f"{did_you_mean(family, FAMILIES)}use one of: {', '.join(FAMILIES)}; a variant with another name has "
            "the key `family`.",
        )
    recipe = _merge_recipes(options, shared)
    try:
        vocab_size = convert(str(options["vocab_size"]), int) if "vocab_size" in options else None
    except ValueError as error:
        raise CtxError(f"{error}.", location="vocab_size", hint="use an integer.") from error
    variant = Variant(name, family, recipe, vocab_size)
    _check_variant(variant)
    return variant


def _merge_recipes(options: Mapping[str, Any], shared: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of the recipe that a variant names, of all variants and of the variant; later ones take precedence, and
    `config_options` are merged."""
    recipe: dict[str, Any] = {}
    if options.get("recipe"):
        file = find_packaged(options["recipe"], "recipes", "recipe", "recipe:")
        recipe = {key: value for key, value in read_recipe(file).items() if key not in _PLANNED_FLAGS}
    flags = {key: value for key, value in options.items() if key not in _VARIANT_KEYS}
    for key, value in (*shared.items(), *flags.items()):
        if key in _PLANNED_FLAGS:
            raise CtxError(f"{key} is determined by the plan.", location=key, hint="remove it.")
        is_merged = key == "config_options" and isinstance(value, dict) and isinstance(recipe.get(key), dict)
        recipe[key] = {**recipe[key], **value} if is_merged else value
    return recipe


def _check_variant(variant: Variant) -> None:
    """Raise CtxError for an invalid size, flag or objective."""
    family, sizes, objectives = variant.family, variant.spec.sizes, variant.spec.objectives
    size = str(variant.recipe.get("config", "tiny"))
    if not size.endswith(".json") and size not in sizes:
        hint = f"add `{variant.name}: {{config: SIZE}}` to the variants, with one of: {', '.join(sizes)}."
        raise CtxError(f"The family {family} has no size {size!r}.", location="config", hint=hint)
    argv = ["--family", family, "--dataset", "demo", "--output_dir", "unused", *recipe_argv(variant.recipe, None)]
    parse_arguments(PretrainingArguments, LoopArguments, argv=argv, program="hf-ctxmodels pretrain")
    if variant.objective not in objectives:
        choices = f"use one of: {', '.join(objectives)}."
        hint = choices if objectives else "remove the family: it is not pretrained on raw text."
        raise CtxError(f"The family {family} has no objective {variant.objective!r}.", hint=hint)
    if objectives[variant.objective].requires_translations:
        raise CtxError(f"The objective {variant.objective} needs translations.", hint="remove this variant.")


def recipe_argv(recipe: Mapping[str, Any], location: object) -> list[str]:
    """Flags of pretrain of a recipe; raises CtxError as `recipe_flags` if one is unknown."""
    names = {entry.name for section in (PretrainingArguments, LoopArguments) for entry in shown_fields(section)}
    return recipe_flags(recipe, names, location)


def _read_measures(root: YamlMapping, folder: Path) -> list[Measure]:
    mapping = root.mapping("measures", "the measures")
    measures = []
    for name in mapping.nodes:
        entry = mapping.text(name)
        kind = str(entry.get("kind", "")) if isinstance(entry, dict) else ""
        if kind not in MEASURES:
            hint = f"{did_you_mean(kind, MEASURES)}use `kind:` with one of: {', '.join(MEASURES)}."
            raise mapping.error(name, f"The measure {name} has no known kind: {kind!r}.", hint, "measures.")
        measures.append(_make_measure(name, entry, mapping.location(name, "measures."), folder))
    if not measures:
        raise root.error("measures", "The plan has no measure.", "add one.")
    return measures


def _make_measure(name: str, entry: Mapping[str, Any], location: str, folder: Path) -> Measure:
    measure_class = MEASURES[entry["kind"]]
    entries = {option.name: option for option in fields(measure_class) if is_settable(option) and option.name != "name"}
    values: dict[str, Any] = {}
    required = [option for option, details in entries.items() if field_default(details) is REQUIRED]
    if missing := [option for option in required if option not in entry]:
        raise CtxError(f"The measure {name} lacks {', '.join(missing)}.", location=location, hint="add the option.")
    for key, value in entry.items():
        if key == "kind":
            continue
        if key not in entries:
            raise CtxError(
                f"The measure {name} has no option {key!r}.",
                location=location,
                hint=f"{did_you_mean(key, entries)}use one of: {', '.join(entries)}.",
            )
        values[key] = _convert_option(value, entries[key], location, folder)
    with located_errors(location):
        _check_name(name, "measure")
        if name == COST:
            raise CtxError(f"{name!r} is the name of the costs of training.", hint="use another name.")
        return measure_class(name=name, **values)


def _convert_option(value: Any, option: Any, location: str, folder: Path) -> Any:
    if option.metadata.get("flags"):
        return value
    is_list = get_origin(option.type) is list
    if option.type in (DataFile, list[DataFile]):
        paths = [
            path
            for text in ([value] if isinstance(value, str) else value)
            for path in _existing_files(str(text), folder, location)
        ]
        if not paths or (len(paths) > 1 and not is_list):
            expected = "files" if is_list else "1"
            hint = "name a file."
            raise CtxError(f"{option.name}: {len(paths)} files, expected {expected}.", location=location, hint=hint)
        return paths if is_list else paths[0]
    if isinstance(value, list) and is_list:
        return list(map(str, value))
    try:
        if not isinstance(value, str):
            raise ValueError(f"invalid value {value!r}")
        return convert(value, option.type)
    except ValueError as error:
        raise CtxError(f"{option.name}: {error}.", location=location, hint="correct the value.") from error


def _existing_files(text: str, folder: Path, location: str) -> list[str]:
    """The file, directory, or the files of a pattern, relative to a folder; raises CtxError if there is none."""
    path = str(folder / text)  # absolute paths remain
    if Path(path).exists():
        return [path]
    try:
        return [file.path for file in match_files(path)]
    except CtxError as error:
        hint = "correct the path, or pass --data_dir."
        raise CtxError(f"There is no file {path}.", location=location, hint=hint) from error
