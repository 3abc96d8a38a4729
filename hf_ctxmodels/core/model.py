"""The base class of all models, and context managers that set a model to evaluation or inspection mode."""

import glob
import inspect
import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform

from hf_ctxmodels.core.adapter_support import (
    ADAPTER_KEYS,
    PeftConfigAttribute,
    newly_initialized_modules,
    report_unloaded_adapters,
)
from hf_ctxmodels.core.config import CtxConfig
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import host_copies_of_inputs
from hf_ctxmodels.core.inputs import check_encoder_input
from hf_ctxmodels.core.output_files import apply_umask, replacing_weights
from hf_ctxmodels.core.remote_code import InstalledCode, without_remote_code
from hf_ctxmodels.core.structure import STRUCTURE_CHANGES, structure_changes
from hf_ctxmodels.core.tensor_parallel import (
    check_loaded_layout,
    check_shardable,
    is_tensor_parallel,
    make_tp_plan,
    shard_heads,
)
from hf_ctxmodels.core.weights import check_exportable, check_savable, register_pending_conversions, require_resizable

SaveHook = Callable[[PreTrainedModel, Path, dict[str, Tensor] | None, bool], dict[str, Tensor] | None]
"""A function of the model, the directory, the weights (None for `model.state_dict()`) and whether this process writes
files; returns the weights to save."""

# arguments of `from_pretrained` for files of the Hub
_HUB_OPTIONS = ("revision", "token", "cache_dir", "force_download", "local_files_only", "proxies")


class CtxPreTrainedModel(PreTrainedModel):
    """The base class of all models: input checks, initialization, saving, export to the reference layout.

    Attributes:
        newly_initialized_modules: Names of the modules that were missing in the checkpoint or have been re-initialized.
        num_new_tokens: Number of trailing word embeddings that were missing in the checkpoint.
        reinitialized_weights: Names of the re-initialized weights, see `downstream.finetuning.reinitialization`.
        save_hooks: Folder in the directory of a saved model -> hook of a base model that writes it; `save_pretrained`
            and `export_reference` of the base model and its heads call the hooks.
        regularizers: Functions of a base model that return a loss term of its heads in training, a scalar or None.
        peft_config: Adapter name -> configuration, after PEFT has adapted the model.
        is_encoder_frozen: Whether the encoder remains in evaluation mode, see `training.freezing.freeze_encoder`.
        token_id_axes: Names of the axes of the ids of one token, after (batch, length); empty if it has one id.
        id_limit_field: Name of the configuration field with the exclusive upper bound of the ids.
        accepts_4d_masks: Whether `attention_mask` can be a 4-D mask of the attention function.
        mask_hint: The hint of the error for a mask with an unsupported number of dimensions; or None.
        loss_targets: Names of the arguments of `forward` with targets, one per loss term. The summed loss of a term is
            divided by its number of targets, or by the number in `num_items_in_batch`.
        logits_fields: Name of a sentence-level target -> output field with its logits, in heads with several losses.
        reference_model_type: `model_type` of the reference implementation in transformers, or None.
        reference_architecture: Name of the reference class; None for the name of this class without the prefix "Ctx".
        export_conversion: The invertible part of the family's weight conversion.
        supports_reentrant_checkpointing: Whether gradient checkpointing with `use_reentrant=True` computes all
            gradients. It computes none for tensors that are not direct arguments of a layer.
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
    save_hooks: Mapping[str, SaveHook] = MappingProxyType({})
    regularizers: Sequence[Callable[[], Tensor | None]] = ()
    peft_config = PeftConfigAttribute()
    is_encoder_frozen: bool = False
    token_id_axes: ClassVar[tuple[str, ...]] = ()
    id_limit_field: ClassVar[str] = "vocab_size"
    accepts_4d_masks: ClassVar[bool] = False
    mask_hint: ClassVar[str | None] = None
    loss_targets: ClassVar[tuple[str, ...]] = ()
    logits_fields: ClassVar[Mapping[str, str]] = {}
    reference_model_type: ClassVar[str | None] = None
    reference_architecture: ClassVar[str | None] = None
    export_conversion: ClassVar[list[WeightTransform]]
    supports_reentrant_checkpointing: ClassVar[bool] = True
    register_for_auto_class = InstalledCode.register_for_auto_class

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Set `config_class` to the most derived class among the annotation of `config` and the bases.

        `PreTrainedModel` uses the first base, and evaluates all annotations, a quarter of this package's import time.
        """
        super(PreTrainedModel, cls).__init_subclass__(**kwargs)
        if "config_class" in cls.__dict__:
            return
        annotated = inspect.get_annotations(cls).get("config")
        candidates = [annotated if isinstance(annotated, type) else None]  # a string if annotations are postponed
        candidates += [getattr(base, "config_class", None) for base in cls.__bases__]
        cls.config_class = max(filter(None, candidates), key=lambda config: len(config.__mro__))

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        """True; transformers would infer it from the source."""
        return True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward`; on a GPU, integer inputs without a host copy are first copied to the host in one read."""
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        with host_copies_of_inputs((*args, *kwargs.values())):
            return super().__call__(*args, **kwargs)

    def post_init(self) -> None:
        """Register pending weight conversions, make the changes of `STRUCTURE_CHANGES`, then initialize as in
        transformers."""
        register_pending_conversions()
        for field in structure_changes(self):
            STRUCTURE_CHANGES[field](self)
        super().post_init()
        self._keys_to_ignore_on_load_unexpected.add(ADAPTER_KEYS)

    def _initialize_weights(self, module: torch.nn.Module, is_custom_code: bool = False) -> None:
        # `is_custom_code` would skip modules without parameters, although `_init_weights` may initialize their
        # children. It is not needed, because `transformers.initialization` preserves loaded weights.
        super()._initialize_weights(module)

    @torch.no_grad()
    def _init_weights(self, module: torch.nn.Module) -> None:
        """Initialize a module as in transformers, or by its `reset_parameters` if `initializes_itself` is set."""
        if getattr(module, "initializes_itself", False):
            module.reset_parameters()  # type: ignore[operator]
        else:
            super()._init_weights(module)

    def _set_gradient_checkpointing(self, *args: Any, **kwargs: Any) -> None:
        """Reject `use_reentrant=True` if layers have further inputs that require gradients."""
        function = kwargs.get("gradient_checkpointing_func")
        if getattr(function, "keywords", {}).get("use_reentrant") and not self.supports_reentrant_checkpointing:
            raise CtxError(
                f"The layers of {type(self).__name__} use encoder states or a learned bias, whose gradients a "
                "re-entrant checkpoint loses.",
                location="use_reentrant=True",
                hint='omit it, or set gradient_checkpointing_kwargs={"use_reentrant": False}.',
            )
        super()._set_gradient_checkpointing(*args, **kwargs)

    def load_pretrained_components(self, missing: Container[str] | None = None) -> None:
        """Load components that the configuration takes from other models, for example word vectors; by default none.

        A separate step after a new model was created (`missing` is None) or a checkpoint without these parameters was
        loaded: neither a configuration nor the initialization of weights loads another model.

        Raises:
            CtxError: A component cannot be loaded, or its shape differs.
        """

    def supports_inplace_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a head that receives `learning_rate` performs the update of this optimizer in its forward."""
        return False

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load as in transformers, freeze `fixed_parameters` of modules, and set `newly_initialized_modules`."""
        model, report = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        for module in model.modules():
            for name in getattr(module, "fixed_parameters", ()):
                getattr(module, name).requires_grad_(False)
        # weights with other shapes, for example for another number of labels, are initialized
        mismatched_names = {name for name, *_ in report["mismatched_keys"]}
        model.newly_initialized_modules = newly_initialized_modules(
            model, mismatched_names | set(report["missing_keys"])
        )
        source = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        hub_options = {name: kwargs[name] for name in _HUB_OPTIONS if name in kwargs}
        hub_options["_commit_hash"] = getattr(model.config, "_commit_hash", None)  # its cached files need no request
        report_unloaded_adapters(source, kwargs.get("subfolder") or "", **hub_options)
        return (model, report) if output_loading_info else model

    def init_parallel_plans(self) -> None:
        """Set the plans of transformers; for tensor parallelism, from the `tp_styles` of the layers."""
        super().init_parallel_plans()
        self._tp_plan = make_tp_plan(self)

    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any, mesh_manager: Any) -> Any:
        """Shard a model under construction as in transformers; raises CtxError if it does not support it."""
        if mesh_manager is None or distributed_config.tp_size == 1:
            return super().maybe_distribute_model(model, distributed_config, mesh_manager)
        mesh = mesh_manager.get_mesh("tp")
        check_shardable(model, mesh.size())
        model = super().maybe_distribute_model(model, distributed_config, mesh_manager)
        shard_heads(model, mesh.get_local_rank(), mesh.size())
        return model

    @staticmethod
    def _finalize_model_loading(model: Any, load_config: Any, loading_info: Any) -> Any:
        if is_tensor_parallel(model):
            check_loaded_layout(model)
        return PreTrainedModel._finalize_model_loading(model, load_config, loading_info)

    def _get_resized_embeddings(self, old_embeddings: Any, *args: Any, **kwargs: Any) -> nn.Embedding:
        require_resizable(old_embeddings)
        return super()._get_resized_embeddings(old_embeddings, *args, **kwargs)

    def _get_resized_lm_head(self, old_lm_head: Any, *args: Any, **kwargs: Any) -> nn.Linear:
        require_resizable(old_lm_head)
        return super()._get_resized_lm_head(old_lm_head, *args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode; a frozen encoder remains in evaluation mode."""
        super().train(mode)
        if self.is_encoder_frozen:
            self.base_model.eval()
        return self

    def prepare_for_inference(self) -> Self:
        """Prepare the Transformer blocks for inference on a CPU; returns the model, in evaluation mode.

        The weights of the linear layers are copied into the memory layout that oneDNN reads fastest, which doubles
        their memory, and each block runs in few operators. Outputs are equal up to rounding. The copies serve forward
        passes without gradients, in float32, and in bfloat16 if the processor multiplies it. A block whose weights,
        modules or hooks change afterwards runs as before; call this method again after training or loading weights. A
        change by `.data` is not noticed.

        Example:
            >>> from hf_ctxmodels import CtxBertConfig, CtxBertModel
            >>> model = CtxBertModel(CtxBertConfig()).prepare_for_inference()
        """
        self.eval()
        for module in self.modules():
            if hasattr(module, "prepack"):
                module.prepack()  # type: ignore[operator]
        return self

    def save_pretrained(self, save_directory: str | Path, save_original_format: bool = False, **kwargs: Any) -> None:
        """Save in the native layout; see `export_reference` for the reference layout.

        By default transformers would reverse the weight conversion, and a resumed Trainer would then silently continue
        from random weights. Save hooks of the base model, for example of bottleneck adapters, can write further files
        and change the weights. Weights of an earlier save in the directory are removed. Weights packed by
        `quantize_dynamic` cannot be saved (CtxError).
        """
        if kwargs.get("state_dict") is None:
            check_savable(self)
        kwargs["state_dict"] = self._call_save_hooks(save_directory, **kwargs)
        is_main_process = kwargs.get("is_main_process", True)
        with replacing_weights(save_directory, kwargs.get("variant")) if is_main_process else nullcontext():
            super().save_pretrained(save_directory, save_original_format=save_original_format, **kwargs)
        if is_main_process:
            apply_umask(Path(save_directory).glob("*model*.safetensors"))

    def _upload_modified_files(
        self, working_dir: str | Path, repo_id: str, files_timestamps: dict[str, float], **kwargs: Any
    ) -> Any:
        """Upload as in transformers, and the folders of save hooks: transformers uploads no nested folders, and reads
        `files_timestamps` after the hooks."""
        times = {path.name: path.stat().st_mtime for path in Path(working_dir).iterdir()}
        hook_folders = times.keys() & self.base_model.save_hooks.keys()
        if not hook_folders:
            return super()._upload_modified_files(working_dir, repo_id, files_timestamps, **kwargs)
        unmodified = {name for name, saved in files_timestamps.items() if name in times and times[name] <= saved}
        unmodified -= hook_folders
        api, revision = HfApi(token=kwargs.pop("token", None)), kwargs.get("revision")
        if revision is not None and not revision.startswith("refs/pr"):
            try:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            except HfHubHTTPError as error:
                # a pull request to the repository of someone else needs no new branch
                is_tolerated = kwargs.get("create_pr") and error.response.status_code == HTTPStatus.FORBIDDEN
                if not is_tolerated:
                    raise
        kwargs["commit_message"] = kwargs.get("commit_message") or "Upload model"
        ignored = [pattern for name in map(glob.escape, unmodified) for pattern in (name, f"{name}/*")]
        return api.upload_folder(repo_id=repo_id, folder_path=working_dir, ignore_patterns=ignored, **kwargs)

    def _call_save_hooks(
        self,
        directory: str | Path,
        state_dict: dict[str, Tensor] | None = None,
        is_main_process: bool = True,
        **kwargs: Any,
    ) -> dict[str, Tensor] | None:
        for hook in self.base_model.save_hooks.values():
            state_dict = hook(self, Path(directory), state_dict, is_main_process)
        return state_dict

    def export_reference(self, save_directory: str | Path) -> None:
        """Write config.json and model.safetensors in the layout of the reference class, with exact weights.

        Raises:
            CtxError: transformers has no such model, or weights are quantized, sharded, adapted, pruned or low-rank.
        """
        if self.reference_model_type is None:
            raise CtxError(f"transformers has no class for {type(self).__name__}.", hint="use save_pretrained.")
        if changes := structure_changes(self):
            name = changes[0].replace("_", " ")
            raise CtxError(f"transformers has no layout for {name}.", hint="use save_pretrained.")
        check_exportable(self)
        dtype = str(self.dtype).removeprefix("torch.")
        config = self.reference_config() | {"dtype": dtype}  # first, since it may raise an error
        original_conversions = getattr(self, "_weight_conversions", None)
        self._weight_conversions: Any = self.export_conversion
        try:
            with without_remote_code(), replacing_weights(save_directory):
                weights = self._call_save_hooks(save_directory)
                super().save_pretrained(save_directory, save_original_format=True, state_dict=weights)
            apply_umask(Path(save_directory).glob("*model*.safetensors"))
        finally:
            self._weight_conversions = original_conversions
        path = Path(save_directory) / "config.json"
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def reference_config(self) -> dict[str, Any]:
        """Return this model's configuration with the fields and names of the reference class, also those with only one
        supported value, which third-party tools read without a default."""
        fixed_values = {name: supported[0] for name, supported in self.config.supported_reference_values.items()}
        values = self.config.to_diff_dict()
        for name in (*self.config.non_reference_fields, "auto_map"):
            values.pop(name, None)
        values = fixed_values | {self.config.reference_name(name): value for name, value in values.items()}
        values["model_type"] = self.reference_model_type
        values["architectures"] = [self.reference_class_name()]
        return values

    @classmethod
    def reference_class_name(cls) -> str:
        """Name of the reference class: `reference_architecture`, or the name of the package's class without the prefix
        "Ctx"."""
        return cls.reference_architecture or cls.package_class_name().removeprefix("Ctx")

    @classmethod
    def package_class_name(cls) -> str:
        """Name of this class, or for a subclass outside this package of the class of this package that it extends."""
        return next(base.__name__ for base in cls.__mro__ if base.__module__.startswith("hf_ctxmodels."))

    check_encoder_input = check_encoder_input

    def check_input_of_any_length(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        width: int | None = None,
        /,
        **aligned: Tensor | None,
    ) -> Tensor:
        """`check_encoder_input` of an encoder without attention, which has no maximum length; `width` is by default
        `config.embedding_size`."""
        width = getattr(self.config, "embedding_size", None) if width is None else width
        return self.check_encoder_input(input_ids, inputs_embeds, attention_mask, None, width=width, **aligned)


_INSPECTION_FIELDS = {"unpad": False, "_attn_implementation": "eager", "return_logits_with_labels": True}


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Disable dropout and gradients; on exit, also after an error, every module returns to its previous mode.

    Example:
        >>> with evaluation_mode(model):
        ...     outputs = model(**batch)
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def inspection_mode(model: nn.Module) -> Iterator[None]:
    """Compute every position with eager attention, so that hooks and explainers work as with transformers' models.

    The layers of Transformers compute padded (batch, length, hidden) states: forward hooks can read and change them,
    `hidden_states[i].retain_grad()` also works for the loss, and attention weights are returned. The outputs are equal,
    but take longer. Recurrent layers compute every position too, but hooks on them receive (rows, width) states, and
    only their last hidden state has a gradient.

    Args:
        model: A model of this package, or a module that contains such models.

    Raises:
        CtxError: There is no such model; or attention weights are requested from a model without attention.

    Example:
        >>> import torch
        >>> from hf_ctxmodels import CtxBertConfig, CtxBertModel
        >>> sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
        >>> model = CtxBertModel(CtxBertConfig(vocab_size=9, **sizes))
        >>> with inspection_mode(model):
        ...     outputs = model(torch.tensor([[1, 2, 3]]), output_attentions=True, output_hidden_states=True)
        ...     outputs.hidden_states[1].retain_grad()
        ...     outputs.last_hidden_state[0, 0].sum().backward()
        >>> outputs.attentions[0].shape, outputs.hidden_states[1].grad.shape
        (torch.Size([1, 2, 3, 3]), torch.Size([1, 3, 8]))
    """
    models = [module for module in model.modules() if isinstance(module, CtxPreTrainedModel)]
    if not models:
        raise CtxError(f"{type(model).__name__} contains no model of this package.")
    configs = {id(submodel.config): submodel.config for submodel in models}.values()
    with ExitStack() as stack:
        for config in configs:
            for name, value in _INSPECTION_FIELDS.items():
                stack.callback(setattr, config, name, getattr(config, name))
                setattr(config, name, value)
        for submodel in models:
            stack.enter_context(submodel.register_forward_hook(_check_attentions, with_kwargs=True))
        yield


def _check_attentions(model: CtxPreTrainedModel, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    if not model.config.resolve_output_flags(kwargs)["output_attentions"] or not hasattr(output, "items"):
        return
    if not any(value for name, value in output.items() if name.endswith("attentions")):
        raise CtxError(
            f"{type(model).__name__} returns no attention weights, but output_attentions is set.",
            hint="omit output_attentions: recurrent networks have no attention.",
        )
