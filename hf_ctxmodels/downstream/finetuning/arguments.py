"""Flags of fine-tuning: the model and the data, fine-tuning methods, adapters."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from accelerate import Accelerator
from transformers import PreTrainedModel

from hf_ctxmodels.core.attention_heads import parse_heads
from hf_ctxmodels.core.console import format_count, print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import (
    REQUIRED,
    ParsedChoices,
    check_conflicts,
    check_range,
    flag,
    non_default_fields,
    parse_choices,
)
from hf_ctxmodels.downstream.adapters.arguments import AdapterArguments
from hf_ctxmodels.downstream.finetuning.ewc import ElasticWeightConsolidation, Labels, compute_fisher, describe_fisher
from hf_ctxmodels.downstream.finetuning.l2_sp import L2SPPenalty
from hf_ctxmodels.downstream.finetuning.mixout import Mixout
from hf_ctxmodels.downstream.finetuning.reinitialization import (
    pretrained_head_modules,
    reinitialize_head,
    reinitialize_layers,
)
from hf_ctxmodels.downstream.finetuning.unfreezing import ChainThaw, ThreeStageUnfreezing
from hf_ctxmodels.layers.attention.head_gates import disable_heads
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.callbacks import FinetuningCallback
from hf_ctxmodels.training.freezing import (
    GradualUnfreezing,
    check_layerwise_flags,
    freeze_encoder,
    freeze_language_layers,
)
from hf_ctxmodels.training.token_embeddings import freeze_token_embeddings
from hf_ctxmodels.training.training_state import flags_identity


@dataclass(frozen=True)
class NewModelOptions:
    """A new model with random weights."""

    family: str = flag(REQUIRED, "Model family.", fixed=True)
    tokenizer: str | None = flag(None, "Tokenizer directory or Hub id (required).")
    config: str | None = flag(None, "Size, or JSON file of configuration fields; by default tiny.")


@dataclass(frozen=True)
class SharedDecoderOptions:
    """The decoder shares the weights of --model, except for the cross-attention (Rothe et al. 2020)."""


@dataclass(frozen=True)
class SeparateDecoderOptions:
    """The decoder has separate weights."""

    model: str | None = flag(
        None, "Checkpoint of the decoder, with the tokenizer of --model; by default --model, as in BERT2BERT."
    )


@dataclass
class StartingModelArguments(ParsedChoices):
    """Model."""

    model: str | None = flag(None, "Checkpoint directory or Hub id, with its tokenizer.")
    family: NewModelOptions | None = flag(
        None,
        "Start from random weights of this family, instead of --model.",
        {name: NewModelOptions(name) for name in FAMILIES},
        conflicts=("model",),
    )
    features: list[str] = flag(
        (),
        "Train a task network on the word vectors of these models, NAME=DIR, instead of --model.",
        conflicts=("model", "family"),
    )
    config_options: list[str] = flag((), "Configuration fields to change, as key=value.")
    task_name: str | None = flag(
        None, "Task of a multi-task --model whose encoder and head are fine-tuned.", conflicts=("family", "features")
    )

    decoder: SharedDecoderOptions | SeparateDecoderOptions | None = flag(
        None,
        "Create an encoder-decoder: --model is the encoder, and this language model, with new cross-attention, the "
        "decoder.",
        {"shared": SharedDecoderOptions, "separate": SeparateDecoderOptions},
        conflicts=("family", "features", "task_name"),
    )

    @property
    def decoder_model(self) -> str | None:
        """Directory or Hub id of the decoder, by default of `model`; None without a `decoder`."""
        if self.decoder is None:
            return None
        return getattr(self.decoder, "model", None) or self.model

    @property
    def tokenizer_source(self) -> str | None:
        """Directory or Hub id of the tokenizer."""
        return self.model if self.family is None else self.family.tokenizer


@dataclass(kw_only=True)
class FinetuningArguments(StartingModelArguments):
    """Model and data."""

    train_file: list[str] = flag(
        REQUIRED,
        "Training examples, from one or more of: .csv, .tsv, .txt, .jsonl, .parquet, CoNLL, .conllu or SQuAD .json, "
        "optionally .gz or .zst; a dataset of the Hub or a directory, ID[:config=NAME,split=NAME]; or `demo`.",
    )
    validation_file: str = flag(
        REQUIRED, "Validation examples in the same format (the default split is validation), or `demo`."
    )
    unlabeled_file: str | None = flag(
        None, "Unlabeled examples for every second batch, for heads that learn from them (cross-view training)."
    )
    train_examples: int | None = flag(None, "Train on a fixed subset of N examples.")
    language: str | None = flag(None, "Language of the text, for models with language embeddings or language tokens.")
    predictions_file: str | None = flag(None, "JSONL file for the final predictions on the validation examples.")
    task: str = flag("", "Task.", fixed=True)


@dataclass
class FinetuningLoopArguments(LoopArguments):
    """Training."""

    is_finetuning: ClassVar[bool] = True

    is_new_model: bool = flag(False, "Whether the model has random weights.", fixed=True)
    lr_reference_targets: float = flag(
        0.0, "Not supported in fine-tuning: tasks have different numbers of targets.", fixed=True
    )

    @property
    def has_pretrained_weights(self) -> bool:
        """Whether the run starts from pretrained weights."""
        return not self.is_new_model


@dataclass(frozen=True)
class FrozenEncoderOptions:
    """Train only the heads and the pooler, on hidden states of the encoder without dropout."""

    cache_features: str | None = flag(None, "Directory to cache the hidden states of the encoder in.")


@dataclass(frozen=True)
class FrozenEmbeddingsOptions:
    """Train all weights except the token embeddings, which can be replaced afterwards."""


@dataclass(frozen=True)
class FrozenLanguageLayersOptions:
    """Train all weights except the layers that each language has separately (Wu et al. 2020)."""

    embeddings: bool = flag(False, "Freeze the token embeddings as well.")


@dataclass(frozen=True)
class GradualUnfreezingOptions:
    """Unfreeze one more layer after each interval, from the top (Howard & Ruder 2018)."""

    steps: float = flag(0.0, "Steps between layers; a fraction of all steps if below 1; 0 divides the run evenly.")

    def __post_init__(self) -> None:
        check_range(self, "steps", at_least=0, location="--freeze gradual")


@dataclass(frozen=True)
class ChainThawOptions:
    """Train the heads, then each layer alone from the lowest, then all weights (Felbo et al. 2017)."""

    head_rate: float = flag(1e-3, "Learning rate of the first stage.")
    rate: float = flag(1e-4, "Learning rate of the other stages.")


@dataclass(frozen=True)
class ThreeStageOptions:
    """Train the heads, then the layers, then the embeddings (Chronopoulou et al. 2019)."""

    layers_epoch: float = flag(1.0, "Epoch after which the layers are trained.")
    embeddings_epoch: float = flag(4.0, "Epoch after which the embeddings are trained.")
    lm_weights: tuple[float, float] | None = flag(
        None, "First and last weight of the auxiliary language modeling loss; released: 0.2,0.1."
    )


@dataclass(frozen=True)
class L2Options:
    """L2 distance (L2-SP, Li et al. 2018)."""

    weight: float = flag(0.01, "Weight of the penalty.")
    head_weight: float = flag(0.0, "Weight of the L2 penalty on new weights.")


@dataclass(frozen=True, kw_only=True)
class EwcOptions(L2Options):
    """Elastic weight consolidation: distance weighted by the Fisher information of pretraining."""

    file: str = flag(REQUIRED, "File of the Fisher information; computed from `text` if missing.")
    text: str | None = flag(None, "Text to compute the Fisher information from, in any format of `pretrain --dataset`.")
    labels: Labels = flag("sampled", "Labels: sampled from the model's predictions, or the labels of the data.")
    examples: int = flag(1000, "Examples to compute the Fisher information from.")


@dataclass(frozen=True)
class MixoutOptions:
    """Dropout towards the pretrained weights (Lee et al. 2020)."""

    probability: float = flag(REQUIRED, "Mixout probability, with which an input uses the pretrained weights.")


FreezingOptions = (
    FrozenEncoderOptions
    | FrozenEmbeddingsOptions
    | FrozenLanguageLayersOptions
    | GradualUnfreezingOptions
    | ChainThawOptions
    | ThreeStageOptions
)


@dataclass
class FinetuningMethodArguments:
    """Fine-tuning methods.

    `freeze` and `anchor` may be given as on the command line: `anchor="l2:weight=0.1"`.

    Raises:
        CtxError: An option is unknown or out of range, or two options cannot be combined.
    """

    freeze: FreezingOptions | None = flag(
        None,
        "Freeze the encoder or a part of it, or unfreeze layers on a schedule.",
        {
            "encoder": FrozenEncoderOptions,
            "embeddings": FrozenEmbeddingsOptions,
            "language-layers": FrozenLanguageLayersOptions,
            "gradual": GradualUnfreezingOptions,
            "chain": ChainThawOptions,
            "three-stage": ThreeStageOptions,
        },
    )
    anchor: L2Options | EwcOptions | MixoutOptions | None = flag(
        None,
        "Keep the weights close to the pretrained ones, by mixout or by a penalty that replaces weight decay.",
        {"l2": L2Options, "ewc": EwcOptions, "mixout": MixoutOptions},
        conflicts=("family", "features"),
    )
    reinit: list[int | Literal["pooler", "head"]] = flag(
        (),
        "Re-initialize the top N layers (of an encoder-decoder, of the decoder), the `pooler` of the encoder, or the "
        "`head` of a checkpoint that was fine-tuned before; one or more of these.",
        conflicts=("family", "features"),
    )
    disabled_heads: str | None = flag(
        None,
        "Attention heads to disable in training and in the saved model, LAYER:HEAD,HEAD;LAYER:HEAD, such as 0:1,3;2:5. "
        "Numbers start at 0; decoder.0 and cross.0 are layers of a decoder.",
    )

    def __post_init__(self) -> None:
        parse_choices(self)
        if self.disabled_heads is not None:
            parse_heads(self.disabled_heads)
        numbers = [value for value in self.reinit if isinstance(value, int)]
        if len(numbers) > 1 or min(numbers, default=0) < 0:
            raise CtxError(
                f"Expected one number of layers, got {' '.join(map(str, numbers))}.",
                location="--reinit",
                hint="use one positive number.",
            )
        self.reinit_layers = numbers[0] if numbers else 0
        if isinstance(self.freeze, FrozenEncoderOptions) and (self.anchor or self.reinit_layers):
            raise CtxError(
                "A frozen encoder is not trained.",
                location="--freeze encoder with --anchor or --reinit N",
                hint="use only one of them.",
            )

    @property
    def unfreezes_layers(self) -> bool:
        """Whether layers are unfrozen during training, so that a step may leave weights without gradients."""
        return isinstance(self.freeze, GradualUnfreezingOptions | ChainThawOptions | ThreeStageOptions)

    def prepare(
        self, model: PreTrainedModel, source: str | None, loop: LoopArguments, accelerator: Accelerator
    ) -> list[FinetuningCallback]:
        """Re-initialize and freeze weights, and make the callbacks of the training loop, in their order.

        The steps depend on earlier ones:

        1. Re-initialize layers, the pooler and the head.
        2. Disable attention heads: sets weights to 0, which step 1 would replace.
        3. Freeze the encoder or a part of it.
        4. Make the callback of the anchor: copies the weights, except the re-initialized and frozen ones.
        5. Make the callback of the unfreezing schedule: chain-thaw reads the parameter groups of the optimizer, which
           a penalty of step 4 splits.

        Args:
            model: The model with its pretrained weights.
            source: The checkpoint that it was loaded from; None for a new model.

        Raises:
            CtxError: The flags do not match the model.
        """
        if source is None and (self.anchor or self.reinit_layers):
            raise CtxError(
                "A new model has no pretrained weights.",
                location="--family with --anchor or --reinit N",
                hint="pass --model, or remove them.",
            )
        reads_layer_mix = getattr(model, "layer_mix", None) is not None or getattr(model, "has_custom_layer_mix", False)
        if getattr(model.config, "layer_mix", False) and not reads_layer_mix:
            raise CtxError(
                f"{type(model).__name__} does not support a layer mix.",
                location="--config_options layer_mix=true",
                hint="remove it.",
            )
        verbose, has_new_pooler = accelerator.is_main_process, "pooler" in self.reinit
        if self.reinit_layers or has_new_pooler:
            names = reinitialize_layers(model, self.reinit_layers, loop.seed, pooler=has_new_pooler)
            print_status(f"re-initialized {format_count(len(names), 'weight')} of the encoder", verbose)
        if "head" in self.reinit:
            names = reinitialize_head(model, loop.seed)
            print_status(f"re-initialized {format_count(len(names), 'weight')} of the head", verbose)
        elif source is not None and hasattr(model, "newly_initialized_modules"):
            modules = ", ".join(pretrained_head_modules(model))
            message = f"the head is loaded from {source} ({modules}); --reinit head re-initializes it"
            print_status(message, verbose and bool(modules))
        if self.disabled_heads is not None:
            disable_heads(model, parse_heads(self.disabled_heads))
        if isinstance(self.freeze, FrozenEmbeddingsOptions):
            freeze_token_embeddings(model)
        elif isinstance(self.freeze, FrozenLanguageLayersOptions):
            freeze_language_layers(model)
            if self.freeze.embeddings:
                freeze_token_embeddings(model)
        elif isinstance(self.freeze, FrozenEncoderOptions):
            check_layerwise_flags(loop)
            freeze_encoder(model)  # type: ignore[arg-type]
        callbacks: list[FinetuningCallback] = []
        match self.anchor:
            case EwcOptions(weight=weight, head_weight=head_weight, file=file) as ewc:
                with accelerator.main_process_first():
                    if not Path(file).exists():
                        options = (ewc.text, file, ewc.examples, ewc.labels, accelerator.device)
                        compute_fisher(source or "", *options, verbose=verbose)
                    elif non_default_fields(ewc) & {"text", "labels", "examples"}:
                        print_status(f"using {file} unchanged: {describe_fisher(file)}", verbose)
                callbacks.append(ElasticWeightConsolidation(model, weight, file, head_weight))
            case MixoutOptions(probability):
                callbacks.append(Mixout(model, probability, loop.seed))
            case L2Options(weight, head_weight):
                callbacks.append(L2SPPenalty(model, weight, head_weight))
        match self.freeze:
            case GradualUnfreezingOptions(steps):
                callbacks.append(GradualUnfreezing(model, steps or None))
            case ChainThawOptions(head_rate, rate):
                if loop.learning_rate == "auto":
                    raise CtxError(
                        "Chain-thaw sets the learning rates of its stages.",
                        location="--freeze chain --learning_rate auto",
                        hint="set them by --freeze chain:head_rate=X,rate=X, and remove --learning_rate.",
                    )
                callbacks.append(ChainThaw(model, head_rate, rate))
            case ThreeStageOptions(layers_epoch, embeddings_epoch, lm_weights):
                callbacks.append(ThreeStageUnfreezing(model, (layers_epoch, embeddings_epoch), lm_weights))
        return callbacks


@dataclass(frozen=True)
class FinetuningMethods:
    """All options that differ from plain fine-tuning.

    Attributes:
        weights: Frozen, re-initialized and regularized weights.
        adapters: Bottleneck adapters.
        low_bits: Training with low-bit weights (`compression.low_bits.training.LowBitsArguments`), or None.

    Raises:
        CtxError: Two of the options cannot be combined.
    """

    weights: FinetuningMethodArguments = field(default_factory=FinetuningMethodArguments)
    adapters: AdapterArguments = field(default_factory=AdapterArguments)
    low_bits: Any = None

    def __post_init__(self) -> None:
        check_conflicts(self.weights, self.adapters)
        if self.adapters.adapter is not None and self.weights.reinit_layers:
            raise CtxError(
                "--adapter cannot be combined with --reinit N.",
                location="--adapter, --reinit",
                hint="remove one of them, also from the recipe.",
            )
        if self.weights.disabled_heads is not None and getattr(self.low_bits, "quantize", None) is not None:
            raise CtxError(
                "The heads of a quantized model cannot be disabled.",
                location="--disabled_heads with --quantize",
                hint="use only one of them.",
            )
        if self.cache_directory is not None and getattr(self.low_bits, "quantize", None) is not None:
            raise CtxError(
                "Cached features are computed with float32 weights.",
                location="--freeze encoder:cache_features with --quantize",
                hint="use only one of them.",
            )

    @property
    def cache_directory(self) -> str | None:
        """Directory to cache the hidden states of a frozen encoder in; None for no cache."""
        return getattr(self.weights.freeze, "cache_features", None)

    def prepare(
        self, model: Any, source: str | None, loop: LoopArguments, accelerator: Accelerator
    ) -> list[FinetuningCallback]:
        """`FinetuningMethodArguments.prepare`, and add the adapters."""
        if self.cache_directory is not None and accelerator.mixed_precision != "no":
            raise CtxError(
                "Features are cached in the precision of the weights.",
                location=f"--freeze encoder:cache_features with mixed precision {accelerator.mixed_precision}",
                hint="use only one of them.",
            )
        callbacks = self.weights.prepare(model, source, loop, accelerator)
        self.adapters.apply(model)
        return callbacks

    def identity(self, model: Any) -> dict[str, Any]:
        """Values that must be equal when the run is resumed; a file of Fisher information is compared by content."""
        fisher_options = (f"anchor.{name}" for name in ("file", "text", "labels", "examples"))
        return {
            **flags_identity(self.weights, ("freeze.cache_features", "reinit", "disabled_heads", *fisher_options)),
            **({} if self.weights.disabled_heads is None else {"disabled_heads": self.weights.disabled_heads}),
            "mixout": getattr(self.weights.anchor, "probability", 0.0),
            "reinit_layers": self.weights.reinit_layers,
            "reinit_modules": [name for name in self.weights.reinit if not isinstance(name, int)],
            **self.adapters.identity(model),
            **({} if self.low_bits is None else self.low_bits.identity()),
        }
