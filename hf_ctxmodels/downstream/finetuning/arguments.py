"""The flags of the ways to fine-tune, and what they make of a model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from accelerate import Accelerator
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag, non_default_fields, reject_flag_conflicts
from hf_ctxmodels.downstream.finetuning.anchoring import ElasticWeightConsolidation, L2SPPenalty
from hf_ctxmodels.downstream.finetuning.feature_cache import cache_features
from hf_ctxmodels.downstream.finetuning.fisher import Labels, describe_fisher
from hf_ctxmodels.downstream.finetuning.forgetting import PretrainingEvaluation, compute_fisher
from hf_ctxmodels.downstream.finetuning.mixout import Mixout
from hf_ctxmodels.downstream.finetuning.reinitialization import (
    pretrained_head_modules,
    reinitialize_head,
    reinitialize_layers,
)
from hf_ctxmodels.downstream.finetuning.unfreezing import ChainThaw, ThreeStageUnfreezing
from hf_ctxmodels.downstream.tasks.base import Collator, Feature
from hf_ctxmodels.tokenizers.base import tokenizer_digest
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.callbacks import FinetuningCallback
from hf_ctxmodels.training.optim.freezing import freeze_encoder, refuse_layerwise_flags
from hf_ctxmodels.training.optim.gradual_unfreezing import GradualUnfreezing
from hf_ctxmodels.training.token_embeddings import freeze_token_embeddings

UNCOMPARED_FIELDS = ("cache_features", "fisher_file", "fisher_text", "fisher_labels", "fisher_examples")
"""Flags that a resumed run may have others of; what a file of Fisher information holds is compared."""


@dataclass
class FinetuningMethodArguments:
    """Ways to fine-tune that keep more of what was pretrained, or that are stabler.

    Raises:
        CtxError: A flag needs another one, or two exclude each other.
    """

    freeze: Literal["encoder", "embeddings"] | None = flag(
        None,
        "`encoder`: train only the heads and the encoder's pooler, on its states as fixed features, without dropout in "
        "the encoder. `embeddings`: train all but those of tokens, which others then take the place of.",
    )
    layer_mix: bool = flag(
        False, "The head reads a learned mix of the embeddings and all layers, as in ELMo, in place of the last layer."
    )
    cache_features: str | None = flag(
        None, "With --freeze encoder: compute the encoder's states once, and keep them in this directory."
    )
    thaw: Literal["gradual", "chain", "three-stage"] | None = flag(
        None,
        "Which layers are trained when: `gradual` from the top down, in equal shares of the run or by "
        "--unfreeze_steps; `chain` the heads, then each layer alone from the lowest up, then all, each stage ending "
        "with its best weights; `three-stage` the heads, then the layers, then the embeddings (--thaw_epochs).",
    )
    chain_rates: list[float] = flag((1e-3, 1e-4), "Learning rates of chain-thaw: of the heads alone, and afterwards.")
    thaw_epochs: list[float] = flag(
        (1.0, 4.0), "Passes over the data after which `three-stage` trains the layers, and the embeddings."
    )
    lm_weights: list[float] | None = flag(
        None,
        "three-stage only: first and last weight of the auxiliary language modelling loss, which falls exponentially; "
        "for heads that have it (gpt, grover). 0.2 0.1 as released.",
    )
    anchor: Literal["l2", "ewc"] | None = flag(
        None,
        "A penalty on the distance from the pretrained weights, in place of their weight decay: `l2`, or `ewc` by the "
        "Fisher information of pretraining.",
    )
    anchor_weight: float = flag(0.01, "Weight of the penalty: half of it times the squared distance.")
    anchor_head_weight: float = flag(0.0, "Weight of a plain L2 penalty on the new weights, beside --anchor.")
    fisher_file: str | None = flag(
        None, "ewc only: file of the Fisher information; a new one is computed from --fisher_text."
    )
    fisher_text: str | None = flag(None, "ewc only: text to compute it from, as --dataset of pretrain.")
    fisher_labels: Labels = flag(
        "sampled", "Targets drawn from the pretrained model's predictions, or those of the data (empirical Fisher)."
    )
    fisher_examples: int = flag(1000, "Rows of the text to compute it from.")
    mixout: float = flag(
        0.0, "Probability by which each input of a linear map of the encoder meets the pretrained weights in a step."
    )
    reinit_layers: int = flag(
        0, "Draw the weights of so many layers anew, from the top; of an encoder-decoder those of the decoder."
    )
    reinit_pooler: bool = flag(False, "Draw the encoder's pooler anew.")
    reset_head: bool = flag(False, "Draw a head anew that the checkpoint already has, from an earlier task.")

    def __post_init__(self) -> None:
        given = non_default_fields(self)
        rules = (
            (
                self.cache_features and self.freeze != "encoder",
                "--cache_features",
                "Features are kept of a frozen encoder.",
            ),
            (self.freeze and self.thaw, "--freeze --thaw", "What is frozen is not thawed."),
            (self.freeze and self.anchor, "--freeze --anchor", "What is frozen needs no anchor."),
            (self.freeze and self.mixout, "--freeze --mixout", "What is frozen has the pretrained weights."),
            (
                self.freeze == "encoder" and self.reinit_layers,
                "--freeze encoder --reinit_layers",
                "Layers that are drawn anew would be frozen as they are drawn.",
            ),
            (self.lm_weights and self.thaw != "three-stage", "--lm_weights", "It belongs to --thaw three-stage."),
            ("thaw_epochs" in given and self.thaw != "three-stage", "--thaw_epochs", "It belongs to three-stage."),
            ("chain_rates" in given and self.thaw != "chain", "--chain_rates", "It belongs to --thaw chain."),
            ("anchor_weight" in given and not self.anchor, "--anchor_weight", "It belongs to --anchor."),
            ("anchor_head_weight" in given and not self.anchor, "--anchor_head_weight", "It belongs to --anchor."),
            (self.anchor == "ewc" and not self.fisher_file, "--anchor ewc", "It needs --fisher_file."),
            *(
                (name in given and self.anchor != "ewc", f"--{name}", "It belongs to --anchor ewc.")
                for name in ("fisher_file", "fisher_text", "fisher_labels", "fisher_examples")
            ),
        )
        reject_flag_conflicts(rules, "give the flags that go together.")
        for name in ("chain_rates", "thaw_epochs", "lm_weights"):
            if (values := getattr(self, name)) is not None and len(values) != 2:
                raise CtxError(f"--{name} takes two numbers.", location=f"--{name} {values}", hint="give two.")

    def configure(self, config: PreTrainedConfig) -> None:
        """Set the fields of the configuration; raises CtxError where there is none for a mix of layers."""
        if self.layer_mix:
            if not hasattr(config, "layer_mix"):
                raise CtxError(
                    f"The heads of {type(config).__name__} read the last layer.",
                    location="--layer_mix",
                    hint="leave it out, or take a family of this package.",
                )
            config.layer_mix = True

    def prepare(
        self, model: PreTrainedModel, source: str | None, loop: LoopArguments, accelerator: Accelerator
    ) -> list[FinetuningCallback]:
        """Draw weights anew and freeze, as the flags say; gives the methods that the loop calls, in their order.

        Args:
            model: With its pretrained weights.
            source: The checkpoint that it was opened from; None for a new model.
            loop: The loop's flags.
            accelerator: The run's.

        Raises:
            CtxError: The flags do not fit the model.
        """
        if source is None and (self.anchor or self.mixout or self.reinit_layers):
            raise CtxError(
                "A new model has no pretrained weights.",
                location="--family with --anchor, --mixout or --reinit_layers",
                hint="give --model, or leave them out.",
            )
        if self.freeze == "encoder":
            refuse_layerwise_flags(loop)
        self._draw_anew(model, source, loop.seed, accelerator.is_main_process)
        if self.freeze == "embeddings":
            freeze_token_embeddings(model)
        elif self.freeze is not None:
            freeze_encoder(model)  # type: ignore[arg-type]
        mixing = [Mixout(model, self.mixout, loop.seed)] if self.mixout else []
        return [*mixing, *self._anchors(model, source, accelerator), *self._thawing(model, loop)]

    def _draw_anew(self, model: PreTrainedModel, source: str | None, seed: int, shown: bool) -> None:
        """Draw weights anew; say that an earlier task's head is kept."""
        if (
            self.layer_mix
            and getattr(model, "layer_mix", None) is None
            and not getattr(model, "has_custom_layer_mix", False)
        ):
            raise CtxError(
                f"{type(model).__name__} does not read a mix of layers.", location="--layer_mix", hint="leave it out."
            )
        if self.reinit_layers or self.reinit_pooler:
            names = reinitialize_layers(model, self.reinit_layers, seed, pooler=self.reinit_pooler)
            print_status(f"{len(names)} weights of the encoder are drawn anew", shown)
        if self.reset_head:
            print_status(f"{len(reinitialize_head(model, seed))} weights of the head are drawn anew", shown)
        elif (
            source is not None
            and hasattr(model, "newly_initialized_modules")
            and (kept := pretrained_head_modules(model))
        ):
            print_status(f"the head is that of {source} ({', '.join(kept)}); --reset_head draws a new one", shown)

    def _anchors(
        self, model: PreTrainedModel, source: str | None, accelerator: Accelerator
    ) -> list[FinetuningCallback]:
        """The penalty on the distance from the pretrained weights, if any."""
        if self.anchor == "l2":
            return [L2SPPenalty(model, self.anchor_weight, self.anchor_head_weight)]
        if self.anchor is None:
            return []
        file = str(self.fisher_file)
        with accelerator.main_process_first():
            if not Path(file).exists():
                self._compute_fisher(file, source or "", accelerator.is_main_process)
            elif non_default_fields(self) & {"fisher_labels", "fisher_examples", "fisher_text"}:
                print_status(f"using {file} as it is: {describe_fisher(file)}", accelerator.is_main_process)
        return [ElasticWeightConsolidation(model, self.anchor_weight, file, self.anchor_head_weight)]

    def _thawing(self, model: PreTrainedModel, loop: LoopArguments) -> list[FinetuningCallback]:
        """Which layers are trained when, if not all; raises CtxError for two plans at once."""
        if self.thaw in ("chain", "three-stage") and loop.unfreeze_steps:
            raise CtxError(
                f"--thaw {self.thaw} and gradual unfreezing are two plans.",
                location=f"--thaw {self.thaw} --unfreeze_steps {loop.unfreeze_steps:g}",
                hint="give --unfreeze_steps 0, also where a recipe has another value.",
            )
        if self.thaw == "chain":
            return [ChainThaw(model, self.chain_rates[0], self.chain_rates[1])]
        if self.thaw == "three-stage":
            weights = None if self.lm_weights is None else (self.lm_weights[0], self.lm_weights[1])
            return [ThreeStageUnfreezing(model, (self.thaw_epochs[0], self.thaw_epochs[1]), weights)]
        return [GradualUnfreezing(model)] if self.thaw == "gradual" and not loop.unfreeze_steps else []

    def _compute_fisher(self, file: str, source: str, shown: bool) -> None:
        if self.fisher_text is None:
            raise CtxError(
                "There is no such file of Fisher information.",
                location=f"--fisher_file {file}",
                hint="give the text to compute it from by --fisher_text.",
            )
        print_status(f"computing the Fisher information of {source} in {file}", shown)
        compute_fisher(
            PretrainingEvaluation.open(source, self.fisher_text), file, self.fisher_examples, self.fisher_labels
        )

    def cache(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        features: list[Feature],
        collate: Collator,
        accelerator: Accelerator,
    ) -> None:
        """Let the head read kept states of the encoder, if a directory is given.

        Args:
            model: With a frozen encoder.
            tokenizer: The tokenizer.
            features: All rows of training and evaluation.
            collate: Rows -> a batch.
            accelerator: The run's.

        Raises:
            CtxError: See `cache_features`; or the run has mixed precision.
        """
        if self.cache_features is None:
            return
        if accelerator.mixed_precision != "no":
            raise CtxError(
                "Features are computed in the precision of the weights.",
                location=f"--cache_features with mixed precision {accelerator.mixed_precision}",
                hint="leave one of them out.",
            )
        batches = [collate([row]) for row in features]
        identity = {"tokenizer": tokenizer_digest(tokenizer)}
        with accelerator.main_process_first():
            shown = accelerator.is_main_process
            cache_features(model, self.cache_features, batches, identity, shown=shown)  # type: ignore[arg-type]
