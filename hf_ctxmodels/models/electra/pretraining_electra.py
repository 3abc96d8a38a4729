"""Joint pretraining of ELECTRA's generator and discriminator (Clark et al. 2020, sections 2 and 3)."""

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoTokenizer
from transformers.utils import ModelOutput, logging
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.inputs import check_ids
from hf_ctxmodels.core.peft_support import untie_adapted_embeddings
from hf_ctxmodels.heads import IGNORE_INDEX, ItemCounts, mean_over_targets, validate_targets
from hf_ctxmodels.models.electra.configuration_electra import CtxElectraConfig
from hf_ctxmodels.models.electra.discriminator_tasks import DISCRIMINATOR_TASKS
from hf_ctxmodels.models.electra.modeling_electra import (
    CtxElectraForMaskedLM,
    CtxElectraForReplacedTokenDetection,
    CtxElectraHeadModel,
)
from hf_ctxmodels.models.electra.replaced_token_detection import FilledBatch, fill_masked

logger = logging.get_logger(__name__)
_WORD_EMBEDDINGS = "electra.embeddings.word_embeddings.weight"
_EMBEDDING_WEIGHTS = [
    _WORD_EMBEDDINGS,
    "electra.embeddings.position_embeddings.weight",
    "electra.embeddings.token_type_embeddings.weight",
    "electra.embeddings.norm.weight",
    "electra.embeddings.norm.bias",
]


@dataclass
class CtxElectraForPreTrainingOutput(ModelOutput):
    """Output of `CtxElectraForPreTraining`.

    Attributes:
        loss: mlm_loss + discriminator_weight x rtd_loss (section 2).
        logits: Logits of the discriminator for `corrupted_ids` (or `input_ids` without `labels`): (batch, length),
            positive for replaced tokens; (batch, length, vocabulary) for a task over the vocabulary. With `labels`,
            only if `returns_logits`.
        mlm_loss: Cross-entropy of the generator in nats, detached.
        rtd_loss: Loss of the discriminator, detached and unweighted.
        corrupted_ids: (batch, length) input of the discriminator, with samples of the generator at masked positions.
        metrics: (numerator, denominator) of the generator's "generator_accuracy" (argmax) and "sampled_accuracy"
            (samples), and of "rtd_precision", "rtd_recall", "rtd_f1" and "rtd_share" of replaced tokens.
        hidden_states, attentions: Hidden states and attention weights of the discriminator; None unless requested.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    mlm_loss: Tensor | None = None
    rtd_loss: Tensor | None = None
    corrupted_ids: Tensor | None = None
    metrics: dict[str, Tensor] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class CtxElectraForPreTraining(CtxElectraHeadModel):
    """Generator and discriminator, trained jointly (section 2).

    The generator replaces masked tokens by samples from its distribution; the discriminator detects replaced tokens.
    The generator's last layer and head run at the masked positions only; one pass of the head returns loss and samples.

    `electra` and the heads at the top level belong to the discriminator; `generator` is a `CtxElectraForMaskedLM`. The
    other classes of the family load the discriminator of a joint checkpoint; `export_generator` saves the generator.
    """

    loss_targets: ClassVar[tuple[str, ...]] = ("labels", "token_labels")
    accepts_loss_kwargs = False

    def build_head(self, config: CtxElectraConfig) -> None:
        """Create the discriminator's heads and the generator, tied according to `config.tie_generator`."""
        self.discriminator_task = DISCRIMINATOR_TASKS[config.discriminator_task]
        self.output_layer = self.discriminator_task.output_layer
        for name, head in self.discriminator_task.build_heads(config).items():
            self.add_module(name, head)
        self.generator = CtxElectraForMaskedLM(config.generator_config())
        shared_weights = {
            "none": [],
            "embeddings": _EMBEDDING_WEIGHTS,
            "all": [f"electra.{name}" for name, _ in self.electra.named_parameters()],
        }[config.tie_generator]
        self._tied_weights_keys = {f"generator.{name}": name for name in shared_weights}
        if self.output_layer is not None and config.tie_word_embeddings:
            self._tied_weights_keys[f"{self.output_layer}.weight"] = _WORD_EMBEDDINGS

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """The tied weights of generator and discriminator, independent of `tie_word_embeddings`."""
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        return dict(self._tied_weights_keys)

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Tie the weights, and freeze the generator again, since loading makes weights trainable."""
        super().tie_weights(*args, **kwargs)
        if self.config.freeze_generator:
            self.generator.requires_grad_(False)

    def untie_adapted_weights(self) -> None:
        """Untie adapted embeddings of the discriminator and of the generator, see `core.peft_support`.

        Raises:
            CtxError: An adapter is attached to a weight shared by both encoders: merging it would change both.
        """
        untie_adapted_embeddings(self)
        if untie_adapted_embeddings(self.generator):
            self.config.generator_overrides = (self.config.generator_overrides or {}) | {"tie_word_embeddings": False}
        discriminator_ids = {id(parameter) for parameter in self.electra.parameters()}
        shared_ids = discriminator_ids & {id(parameter) for parameter in self.generator.parameters()}
        adapted_layers = [module.base_layer for module in self.modules() if hasattr(module, "base_layer")]
        if any(id(layer.weight) in shared_ids for layer in adapted_layers):
            raise CtxError(
                f"An adapter is attached to weights that tie_generator={self.config.tie_generator!r} shares: merging "
                "it would change both encoders.",
                hint='adapt other modules, load a single encoder, or train with tie_generator="none".',
            )

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize both vocabularies."""
        self.generator.resize_token_embeddings(*args, **kwargs)
        return super().resize_token_embeddings(*args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        labels: Tensor | None = None,
        token_labels: Tensor | None = None,
        sampling_seed: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> CtxElectraForPreTrainingOutput:
        """Compute both losses with `labels`; without labels, the discriminator's logits for `input_ids`.

        Args:
            labels: (batch, length) original ids of the masked tokens, -100 elsewhere.
            token_labels: (batch, length) original ids of all tokens, -100 at padding, for the discriminator's loss.
                None derives them from `labels` and `input_ids`.
            sampling_seed: (batch,) int64, the seed of the samples of each example. None derives it from the masked
                tokens.
            return_logits: See `returns_logits`.
            kwargs: Arguments of the discriminator's encoder.
        """
        inputs = {
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "sequence_ids": sequence_ids,
        }
        labels = self.validate_token_targets(labels, "labels", input_ids, inputs_embeds)
        if labels is None:
            outputs = self.encode(input_ids=input_ids, inputs_embeds=inputs_embeds, **inputs, **kwargs)
            return CtxElectraForPreTrainingOutput(
                logits=self._logits(outputs), hidden_states=outputs.hidden_states, attentions=outputs.attentions
            )
        if input_ids is None or inputs_embeds is not None:
            raise CtxError(
                "labels require input_ids, since the generator replaces tokens.", hint="pass input_ids with labels."
            )
        token_labels = self._validate_token_labels(input_ids, labels, token_labels)
        corrupted = self._generate(input_ids, labels, sampling_seed, inputs)
        if token_labels is None:
            token_labels = _original_ids(input_ids, labels, attention_mask, sequence_ids)
        name, targets = ("labels", labels) if self.discriminator_task.masked_only else ("token_labels", token_labels)
        is_target, with_logits = targets != IGNORE_INDEX, self.returns_logits(return_logits)
        outputs = self.encode(
            input_ids=corrupted.input_ids, output_mask=None if with_logits else is_target, **inputs, **kwargs
        )
        states = outputs.last_hidden_state[is_target] if with_logits else outputs.last_hidden_state
        total, metrics = self.discriminator_task.loss(
            self, states, corrupted.input_ids[is_target], token_labels[is_target]
        )
        mlm_loss = mean_over_targets(corrupted.loss, labels, "labels", num_items_in_batch)
        rtd_loss = mean_over_targets(total, targets, name, num_items_in_batch)
        weighted_rtd_loss = self.config.discriminator_weight * rtd_loss
        return CtxElectraForPreTrainingOutput(
            loss=weighted_rtd_loss if self.config.freeze_generator else mlm_loss + weighted_rtd_loss,
            logits=self._logits(outputs) if with_logits else None,
            mlm_loss=mlm_loss.detach(),
            rtd_loss=rtd_loss.detach(),
            corrupted_ids=corrupted.input_ids,
            metrics=_generator_metrics(corrupted, labels) | metrics,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _logits(self, outputs: Any) -> Tensor:
        return self.get_submodule(self.discriminator_task.head_name)(outputs.last_hidden_state)

    def _generate(
        self, input_ids: Tensor, labels: Tensor, sampling_seed: Tensor | None, inputs: dict[str, Tensor | None]
    ) -> FilledBatch:
        if sampling_seed is not None:
            sampling_seed = validate_targets(sampling_seed, "sampling_seed", input_ids.shape[:1])
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.config.freeze_generator):
            outputs = self.generator.encode(input_ids=input_ids, output_mask=labels != IGNORE_INDEX, **inputs)
            return fill_masked(outputs.last_hidden_state, self.generator.mlm_head, input_ids, labels, sampling_seed)

    def _validate_token_labels(self, input_ids: Tensor, labels: Tensor, token_labels: Any) -> Tensor | None:
        token_labels = self.validate_token_targets(token_labels, "token_labels", input_ids)
        for name, target in {"labels": labels, "token_labels": token_labels}.items():
            if target is not None:
                check_ids(name, target.masked_fill(target == IGNORE_INDEX, 0), self.config.vocab_size, "vocab_size")
        return token_labels

    def export_reference(self, save_directory: str | Path) -> None:
        """Export the discriminator, see `export_discriminator`."""
        self.export_discriminator(save_directory)

    def export_discriminator(self, save_directory: str | Path) -> None:
        """Export the discriminator as `transformers.ElectraForPreTraining`: weights (bit-exact) and config.json.

        A discriminator with a task over the vocabulary (`discriminator_task`) is exported as `ElectraForMaskedLM`,
        without its copy gate.

        Args:
            save_directory: Directory for config.json and model.safetensors; created if needed.
        """
        head_name = self.discriminator_task.head_name
        model_class = {"rtd_head": CtxElectraForReplacedTokenDetection, "mlm_head": CtxElectraForMaskedLM}[head_name]
        with torch.device("meta"):
            discriminator = model_class(self.config)
        discriminator.electra = self.electra
        discriminator.set_submodule(head_name, self.get_submodule(head_name))
        discriminator.export_reference(save_directory)

    def export_generator(self, save_directory: str | Path) -> None:
        """Export the generator as `transformers.ElectraForMaskedLM`: weights (bit-exact) and config.json.

        Args:
            save_directory: Directory for config.json and model.safetensors; created if needed.
        """
        self.generator.export_reference(save_directory)

    @classmethod
    def from_pretrained_pair(
        cls,
        generator: str | PathLike[str],
        discriminator: str | PathLike[str],
        *,
        tie_generator: str | None = None,
        **changes: Any,
    ) -> Self:
        """Build the joint model from two checkpoints, of transformers or of this package.

        Args:
            generator: Directory or Hub id of a masked-LM checkpoint.
            discriminator: Directory or Hub id of a checkpoint with any head, for example the generator (two-stage
                training, section 3.2); a missing detection head is initialised.
            tie_generator: See `CtxElectraConfig`. None ties the embeddings if they are equal in both checkpoints, else
                no weights (with a warning).
            changes: Other fields of the configuration, for example `discriminator_weight` or `freeze_generator`.

        Raises:
            CtxError: The checkpoints do not match.
        """
        generator_model = _load(CtxElectraForMaskedLM, generator, "mlm_head.", "electra.")
        discriminator_model = _load(CtxElectraForReplacedTokenDetection, discriminator, "electra.")
        generator_config, discriminator_config = generator_model.config, discriminator_model.config
        _check_same_vocabulary(generator_config, discriminator_config, generator, discriminator)
        config = _pair_config(generator_config, discriminator_config, tie_generator or "embeddings", changes)
        weights, generator_weights = discriminator_model.electra.state_dict(), generator_model.electra.state_dict()
        shared = {
            "none": [],
            "embeddings": [name.removeprefix("electra.") for name in _EMBEDDING_WEIGHTS],
            "all": list(weights),
        }[config.tie_generator]
        differing = [
            name
            for name in shared
            if name not in generator_weights or not torch.equal(weights[name], generator_weights[name])
        ]
        if differing:
            problem = f"{differing[0]} differs between generator and discriminator"
            if tie_generator is not None:
                raise CtxError(
                    f"{problem}, but tie_generator={tie_generator!r} shares it.",
                    location=f"{generator}, {discriminator}",
                    hint='set tie_generator="none", or use two checkpoints of the same training.',
                )
            logger.warning(f"{problem}; no weights are tied (tie_generator='none').")
            config = _pair_config(generator_config, discriminator_config, "none", changes)
        model = cls(config).to(discriminator_model.dtype)
        model.electra.load_state_dict(weights)
        model.generator.load_state_dict(generator_model.state_dict())
        if model.discriminator_task.head_name == "rtd_head":
            model.rtd_head.load_state_dict(discriminator_model.rtd_head.state_dict())
        return model.eval()


def _original_ids(
    input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None, sequence_ids: Tensor | None
) -> Tensor:
    """(batch, length) the ids before masking, -100 at padding."""
    original_ids = torch.where(labels == IGNORE_INDEX, input_ids, labels)
    for mask in (attention_mask, sequence_ids):
        if mask is not None and mask.dim() == 2:
            original_ids = original_ids.masked_fill(mask == 0, IGNORE_INDEX)
    return original_ids


def _generator_metrics(corrupted: FilledBatch, labels: Tensor) -> dict[str, Tensor]:
    masked = labels != IGNORE_INDEX
    num_correct = {
        "generator_accuracy": corrupted.correct,
        "sampled_accuracy": ((corrupted.input_ids == labels) & masked).sum(),
    }
    return {name: torch.stack([count, masked.sum()]).float() for name, count in num_correct.items()}


def _load(model_class: type[CtxElectraHeadModel], source: str | PathLike[str], *required_prefixes: str) -> Any:
    """Load a generator or discriminator; raises CtxError if weights with one of the prefixes are missing."""
    model, report = model_class.from_pretrained(source, output_loading_info=True)
    missing = sorted(name for name in report["missing_keys"] if name.startswith(required_prefixes))
    if missing or report["mismatched_keys"]:
        problem = f"it has no {missing[0]}" if missing else "the shapes of its weights differ"
        raise CtxError(
            f"The checkpoint is not a {model_class.__name__}: {problem}.",
            location=str(source),
            hint="a generator is an ElectraForMaskedLM; export it from a joint checkpoint with "
            "export_generator(directory).",
        )
    return model


def _check_same_vocabulary(
    generator_config: CtxElectraConfig,
    discriminator_config: CtxElectraConfig,
    generator: str | PathLike[str],
    discriminator: str | PathLike[str],
) -> None:
    """Raise CtxError if the vocabularies differ, in size or in the tokenizers saved with the weights."""
    location = f"{generator}, {discriminator}"
    hint = "use a generator and a discriminator that were trained with the same tokenizer."
    if generator_config.vocab_size != discriminator_config.vocab_size:
        raise CtxError(
            f"The generator has a vocabulary of {generator_config.vocab_size} tokens, the discriminator of "
            f"{discriminator_config.vocab_size}.",
            location=location,
            hint=hint,
        )
    directories = [Path(generator), Path(discriminator)]
    if not all((path / "tokenizer.json").exists() or (path / "vocab.txt").exists() for path in directories):
        return
    generator_vocab, vocab = (AutoTokenizer.from_pretrained(path).get_vocab() for path in directories)
    if generator_vocab != vocab:
        token = next(token for token in {**generator_vocab, **vocab} if generator_vocab.get(token) != vocab.get(token))
        raise CtxError(
            f"The vocabularies differ: {token!r} has id {generator_vocab.get(token)} in the generator and "
            f"{vocab.get(token)} in the discriminator.",
            location=location,
            hint=hint,
        )


def _pair_config(
    generator: CtxElectraConfig, discriminator: CtxElectraConfig, tie_generator: str, changes: dict[str, Any]
) -> CtxElectraConfig:
    """The discriminator's configuration with this generator; raises CtxError if it is invalid."""
    try:
        return discriminator.with_generator(generator, tie_generator=tie_generator, **changes)
    except StrictDataclassError as error:
        raise CtxError(str(error.__cause__ or error)) from error
