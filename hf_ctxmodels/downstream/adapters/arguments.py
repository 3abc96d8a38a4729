"""Flags of the commands that train adapters."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.downstream.adapters.adapter_set import get_adapter_set, has_adapters
from hf_ctxmodels.downstream.adapters.configuration import ADAPTER_CONFIGS, BottleneckConfig, resolve_config
from hf_ctxmodels.downstream.adapters.management import add_adapter, set_active_adapters, train_adapter
from hf_ctxmodels.downstream.adapters.save_load import load_adapter
from hf_ctxmodels.downstream.tasks.language_files import directories_of_languages

LANGUAGE_CONFIG, TASK_CONFIG = "madx-language", "madx-task"


@dataclass
class AdapterArguments:
    """Which adapter to train, on which others."""

    adapter: str | None = flag(
        None,
        f"Train a bottleneck adapter of this name; the model is frozen, in fine-tuning but for the head. NAME:KIND "
        f"with one of {', '.join(ADAPTER_CONFIGS)}; by default {LANGUAGE_CONFIG} in pretraining, else {TASK_CONFIG}.",
    )
    adapter_options: list[str] = flag((), "Fields of the adapter's form that differ from the kind's, as key=value.")
    adapters: str | None = flag(
        None,
        "Frozen adapters below it, from the lowest up: folders or Hub ids, separated by commas. In evaluate-transfer "
        "one for each language, as LANGUAGE=FOLDER.",
    )

    @property
    def name(self) -> str:
        """Of the adapter that is trained."""
        return (self.adapter or "").partition(":")[0]

    def form(self, kind: str) -> BottleneckConfig:
        """The form of the adapter that is trained.

        Args:
            kind: By default.

        Raises:
            CtxError: There is no such kind or field.
        """
        config = resolve_config((self.adapter or "").partition(":")[2] or kind)
        known = [field.name for field in fields(config)]
        for text in self.adapter_options:
            name, _, value = text.partition("=")
            if name not in known or not value:
                raise CtxError(
                    f"{text!r} is no field of an adapter's form with a value.",
                    location="--adapter_options",
                    hint=f"give key=value with one of {', '.join(known)}.",
                )
            config = replace(config, **{name: _parsed(value)})
        return config

    def apply(self, model: PreTrainedModel, kind: str, *, freeze_head: bool = False, frozen: bool = False) -> None:
        """Give the model its adapters and freeze the rest; nothing without `--adapter`.

        Args:
            model: To be trained.
            kind: Of a new adapter by default.
            freeze_head: Whether the head is frozen too.
            frozen: Whether another flag says which weights of the encoder are trained.

        Raises:
            CtxError: The flags contradict each other, or an adapter cannot be made or opened.
        """
        if self.adapter is None:
            if self.adapters or self.adapter_options:
                raise CtxError("No adapter is to be trained.", location="--adapters", hint="give --adapter NAME.")
            return
        if frozen:
            raise CtxError(
                "Below an adapter the encoder is frozen.",
                location="--adapter with --freeze, --thaw, --anchor or --mixout",
                hint="leave one of them out.",
            )
        below = [load_adapter(model, source.strip()) for source in (self.adapters or "").split(",") if source.strip()]
        add_adapter(model, self.name, self.form(kind))
        train_adapter(model, self.name, below, freeze_head=freeze_head)

    def apply_for_pretraining(self, model: PreTrainedModel) -> None:
        """`apply` for pretraining: a language adapter by default, below a frozen head."""
        self.apply(model, LANGUAGE_CONFIG, freeze_head=True)

    def identity(self, model: PreTrainedModel) -> dict[str, Any]:
        """Values that must be equal when the run is resumed, see `adapter_identity`."""
        return adapter_identity(model)

    def directories_by_language(self, train: str, tests: Iterable[str]) -> dict[str, str]:
        """Language -> folder of its adapter, from `--adapters en=DIR,de=DIR`; none without these flags.

        Raises:
            CtxError: One of the languages has none.
        """
        return directories_of_languages(self.adapters, (train, *tests), "adapter", "--adapters")

    def for_language(self, folders: dict[str, str], language: str) -> "AdapterArguments":
        """The flags for training in a language."""
        return replace(self, adapters=folders.get(language))


def adapter_identity(model: PreTrainedModel) -> dict[str, Any]:
    """What of a model's adapters must be equal when a run is resumed; nothing without any."""
    if not has_adapters(model):
        return {}
    known = get_adapter_set(model)
    return {"adapters": {name: asdict(form) for name, form in known.configs.items()}, "adapters_active": known.active}


def check_adapters(config: PreTrainedConfig, folders: Mapping[str, str]) -> None:
    """Open the adapter of each language in a model without weights, before any training.

    Raises:
        CtxError: As `load_adapter`.
    """
    if not folders:
        return
    with torch.device("meta"):
        model = AutoModel.from_config(config)
        for language, folder in folders.items():
            load_adapter(model, folder, f"language_{language}", with_head=False)


def replace_lowest_adapter(model: PreTrainedModel, name: str, source: str) -> str:
    """Put another adapter in the place of the lowest active one (MAD-X: of another language).

    Args:
        model: With active adapters.
        name: What the new one is called, unless the model has it.
        source: Its folder or Hub id.

    Returns:
        The name.

    Raises:
        CtxError: As `load_adapter`.
    """
    known = get_adapter_set(model)
    if name not in known.configs:
        load_adapter(model, source, name, with_head=False)
    set_active_adapters(model, [name, *known.active[1:]])
    return name


def _parsed(value: str) -> Any:
    written = {"True": "true", "False": "false", "None": "null"}.get(value, value)
    try:
        found = json.loads(written)
    except ValueError:
        return value  # a plain word
    return tuple(found) if isinstance(found, list) else found
