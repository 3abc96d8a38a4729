"""The model base every family derives from: checked input, native saving, export to the reference layout."""

import inspect
import json
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform

from hf_ctxmodels.core.adapter_files import ADAPTER_KEYS, report_unloaded_adapters
from hf_ctxmodels.core.config import CtxConfig
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import check_encoder_input
from hf_ctxmodels.core.peft_support import PeftConfigAttribute, newly_initialized_modules
from hf_ctxmodels.core.remote_code import without_remote_code
from hf_ctxmodels.core.weights import check_exportable, check_savable, register_pending_conversions

SaveHook = Callable[[PreTrainedModel, Path, dict[str, Tensor] | None, bool], dict[str, Tensor] | None]
"""Called with a model, the directory, the weights (None for the model's) and whether this process writes files; returns
the weights to save."""


class CtxPreTrainedModel(PreTrainedModel):
    """The base class of all models: input checks, initialisation, saving, export to the reference layout.

    Attributes:
        newly_initialized_modules: Names of the modules that were missing in the checkpoint or have been re-initialised.
        num_new_tokens: Number of the last word embeddings that were missing in the checkpoint.
        reinitialized_weights: Names of the re-initialised weights, see `downstream.finetuning.reinitialization`.
        save_hooks: Hooks of a base model that `save_pretrained` and `export_reference` call, also for a head on it.
        regularizers: Functions of a base model's parameters that heads add to the training loss, each a scalar or None.
        peft_config: PEFT's configurations by adapter, once PEFT has adapted the model.
        is_encoder_frozen: Whether the encoder stays in evaluation mode, see `training.optim.freezing.freeze_encoder`.
        token_id_axes: Names of the axes of a single token's ids; empty if a token is one integer.
        id_limit_field: Field of the configuration with the exclusive upper limit of the ids.
        accepts_4d_masks: Whether `attention_mask` may be a 4-D mask of the attention function.
        mask_hint: Fix in the error for a mask with an unsupported number of dimensions; or None.
        loss_targets: The arguments of `forward` with targets, one for each loss term. The summed loss of a term is
            divided by its number of targets, or by the number in `num_items_in_batch`.
        reference_model_type: `model_type` of the reference implementation in transformers, or None.
        reference_architecture: Name of the reference class; None for the name of this class without "Ctx".
        export_conversion: The invertible part of the family's weight conversion.
        supports_reentrant_checkpointing: Whether gradient checkpointing with `use_reentrant=True` is exact: it loses
            gradients of tensors that are not among the arguments of a layer.
    """

    config: CtxConfig
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    newly_initialized_modules: tuple[str, ...] = ()
    num_new_tokens: int = 0
    reinitialized_weights: tuple[str, ...] = ()
    save_hooks: Sequence[SaveHook] = ()
    regularizers: Sequence[Callable[[], Tensor | None]] = ()
    peft_config = PeftConfigAttribute()
    is_encoder_frozen: bool = False
    token_id_axes: ClassVar[tuple[str, ...]] = ()  # of a single token, after (batch, length)
    id_limit_field: ClassVar[str] = "vocab_size"
    accepts_4d_masks: ClassVar[bool] = False
    mask_hint: ClassVar[str | None] = None
    loss_targets: ClassVar[tuple[str, ...]] = ()
    reference_model_type: ClassVar[str | None] = None
    reference_architecture: ClassVar[str | None] = None
    export_conversion: ClassVar[list[WeightTransform]]
    supports_reentrant_checkpointing: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Take the most derived configuration among the class's own annotation and its bases.

        PreTrainedModel takes the first base's, which for a mixin of several families is a general one. Its method is
        passed over: it evaluates all annotations of the class and its bases, a quarter of the time of this import.
        """
        super(PreTrainedModel, cls).__init_subclass__(**kwargs)
        if "config_class" in cls.__dict__:
            return
        annotated = inspect.get_annotations(cls).get("config")
        known = [annotated if isinstance(annotated, type) else None]  # a string where annotations are postponed
        known += [getattr(base, "config_class", None) for base in cls.__bases__]
        cls.config_class = max(filter(None, known), key=lambda config: len(config.__mro__))

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Do not register the class as custom code: it is always imported from the installed package."""

    def post_init(self) -> None:
        """Finish the construction as in transformers, after registering pending weight conversions."""
        register_pending_conversions()
        super().post_init()
        self._keys_to_ignore_on_load_unexpected.add(ADAPTER_KEYS)

    def _initialize_weights(self, module: torch.nn.Module, is_custom_code: bool = False) -> None:
        # With `is_custom_code`, modules without parameters are skipped, although `_init_weights` may initialise their
        # children. All families use `transformers.initialization`, which keeps loaded weights.
        super()._initialize_weights(module)

    @torch.no_grad()
    def _init_weights(self, module: torch.nn.Module) -> None:
        """Initialise a module as in transformers, or by its `reset_parameters` if it has `initializes_itself`."""
        if getattr(module, "initializes_itself", False):
            module.reset_parameters()  # type: ignore[operator]
        else:
            super()._init_weights(module)

    def _set_gradient_checkpointing(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers.

        Raises:
            CtxError: `use_reentrant=True`, and the layers take more than their input that is differentiated.
        """
        function = kwargs.get("gradient_checkpointing_func")
        if getattr(function, "keywords", {}).get("use_reentrant") and not self.supports_reentrant_checkpointing:
            raise CtxError(
                f"The layers of {type(self).__name__} also read the source's states or a learned bias, whose gradients "
                "a re-entrant checkpoint loses.",
                location="use_reentrant=True",
                hint='leave it out, or give gradient_checkpointing_kwargs={"use_reentrant": False}.',
            )
        super()._set_gradient_checkpointing(*args, **kwargs)

    def load_pretrained_components(self, missing: Container[str] | None = None) -> None:
        """Copy what the configuration takes from other models, for example word vectors: for families that take any.

        It is a step of its own after a new model was made or a checkpoint without these parts was opened; neither a
        configuration nor the initialisation of weights opens another model.

        Args:
            missing: Names of the parameters that a checkpoint lacked; None for a new model, where all are to be filled.

        Raises:
            CtxError: A source cannot be opened, or does not fit.
        """

    def supports_inplace_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a head, given a `learning_rate`, does the work of this optimizer by itself: no backward pass."""
        return False

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Open a directory or Hub id, as every model does. What a module names in `fixed_parameters` stays fixed, where
        transformers would make every weight it reads a parameter to be trained."""
        model, report = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        for module in model.modules():
            for name in getattr(module, "fixed_parameters", ()):
                getattr(module, name).requires_grad_(False)
        replaced = {name for name, *_ in report["mismatched_keys"]}  # of another shape, for example other labels
        model.newly_initialized_modules = newly_initialized_modules(model, replaced | set(report["missing_keys"]))
        report_unloaded_adapters(args[0] if args else kwargs.get("pretrained_model_name_or_path"))
        return (model, report) if output_loading_info else model

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode; a frozen encoder has the latter in any case."""
        super().train(mode)
        if self.is_encoder_frozen:
            self.base_model.eval()
        return self

    def save_pretrained(self, save_directory: str | Path, save_original_format: bool = False, **kwargs: Any) -> None:
        """Save in the native layout.

        transformers reverses conversion tables on save by default, and Trainer's resume then finds no native key and
        silently goes on from random weights; `export_reference` is the way to the reference layout.

        Hooks of the base model, for example of bottleneck adapters, may write further files and change the weights.

        Raises:
            CtxError: The weights are packed by `quantize_dynamic`.
        """
        if kwargs.get("state_dict") is None:
            check_savable(self)
        kwargs["state_dict"] = self._call_save_hooks(save_directory, **kwargs)
        super().save_pretrained(save_directory, save_original_format=save_original_format, **kwargs)

    def _call_save_hooks(
        self,
        directory: str | Path,
        state_dict: dict[str, Tensor] | None = None,
        is_main_process: bool = True,
        **kwargs: Any,
    ) -> dict[str, Tensor] | None:
        for hook in self.base_model.save_hooks:
            state_dict = hook(self, Path(directory), state_dict, is_main_process)
        return state_dict

    def export_reference(self, save_directory: str | Path) -> None:
        """Write weights and a config.json that the reference class in transformers opens, bit for bit.

        Args:
            save_directory: Folder to write config.json and model.safetensors to; created if needed.

        Raises:
            CtxError: transformers has no such model, or the weights are quantized, sharded or beside an adapter.
        """
        if self.reference_model_type is None:
            raise CtxError(f"transformers has no peer of {type(self).__name__}.", hint="use save_pretrained.")
        check_exportable(self)
        config = self.reference_config()  # first: a family may refuse what its reference cannot hold
        loaded_with = getattr(self, "_weight_conversions", None)
        self._weight_conversions: Any = self.export_conversion
        try:
            with without_remote_code():
                weights = self._call_save_hooks(save_directory)
                super().save_pretrained(save_directory, save_original_format=True, state_dict=weights)
        finally:
            self._weight_conversions = loaded_with
        path = Path(save_directory) / "config.json"
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def reference_config(self) -> dict[str, Any]:
        """This model's configuration as the reference class reads it."""
        values = self.config.to_diff_dict()
        for own in (*self.config.non_reference_fields, "auto_map"):
            values.pop(own, None)
        values = {self.config.reference_name(name): value for name, value in values.items()}
        values["model_type"] = self.reference_model_type
        values["architectures"] = [self.reference_architecture or type(self).__name__.removeprefix("Ctx")]
        return values

    def check_encoder_input(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        max_length: int | None,
        *,
        width: int | None = None,
        sequence_ids: Tensor | None = None,
        output_mask: Tensor | None = None,
        **aligned: Tensor | None,
    ) -> Tensor:
        """`hf_ctxmodels.core.inputs.check_encoder_input` for the ids of this family; `aligned` by argument name."""
        return check_encoder_input(
            input_ids,
            inputs_embeds,
            attention_mask,
            max_length,
            limit=getattr(self.config, self.id_limit_field),
            limit_name=self.id_limit_field,
            token_id_axes=self.token_id_axes,
            width=width,
            accepts_4d_masks=self.accepts_4d_masks,
            mask_hint=self.mask_hint,
            sequence_ids=sequence_ids,
            output_mask=output_mask,
            aligned=aligned,
            dtype=None if inputs_embeds is None or torch.compiler.is_compiling() else self.dtype,
        )

    def check_word_input(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        width: int | None = None,
        /,
        **aligned: Tensor | None,
    ) -> Tensor:
        """`check_encoder_input` of encoders without attention: any length.

        Args:
            width: Of embeddings; None for `config.embedding_size`.

        Raises:
            CtxError: As there.
        """
        width = getattr(self.config, "embedding_size", None) if width is None else width
        return self.check_encoder_input(input_ids, inputs_embeds, attention_mask, None, width=width, **aligned)
