"""Joint pretraining of ELECTRA's generator and discriminator (Clark et al. 2020, sections 2 and 3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoTokenizer
from transformers.utils import ModelOutput, logging
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.core.adapter_support import untie_adapted_embeddings
from hf_ctxmodels.core.config import convert_config_errors
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import host_copy, is_traced, on_host, select_true, set_host_copy
from hf_ctxmodels.core.inputs import padding_mask_or_none
from hf_ctxmodels.heads import ItemCounts, build_mlm_head, mean_over_targets, validate_targets
from hf_ctxmodels.heads.base import check_classes, ignore_padding, mask_of_targets
from hf_ctxmodels.models.electra.configuration_electra import CtxElectraConfig
from hf_ctxmodels.models.electra.modeling_electra import (
    CtxElectraForMaskedLM,
    CtxElectraForReplacedTokenDetection,
    CtxElectraHeadModel,
)
from hf_ctxmodels.models.electra.replaced_token_detection import (
    DetectionHead,
    copy_or_predict_loss,
    detection_counts,
    detection_loss,
    fill_masked,
)

logger = logging.get_logger(__name__)
_EMBEDDING_WEIGHTS = (
    "embeddings.word_embeddings.weight",
    "embeddings.position_embeddings.weight",
    "embeddings.token_type_embeddings.weight",
    "embeddings.norm.weight",
    "embeddings.norm.bias",
)


def _shared_weights(tie_generator: str, encoder_weights: Sequence[str]) -> Sequence[str]:
    """Names, among the weights of the encoder, of those that generator and discriminator share."""
    embeddings = [name for name in _EMBEDDING_WEIGHTS if name in encoder_weights]  # without segments if it has none
    return {"none": (), "embeddings": embeddings, "all": encoder_weights}[tie_generator]


@dataclass
class CtxElectraForPreTrainingOutput(ModelOutput):
    """Output of `CtxElectraForPreTraining`.

    Attributes:
        loss: mlm_loss + discriminator_weight x rtd_loss (section 2). An adversarial generator has the losses of
            REINFORCE and of its baseline instead of mlm_loss (appendix F).
        logits: Logits of the discriminator for `corrupted_ids` (or `input_ids` without `labels`): (batch, length),
            positive for replaced tokens; (batch, length, vocabulary) for a task over the vocabulary. With `labels`,
            only if `needs_all_logits`.
        mlm_loss: Cross-entropy of the generator in nats, detached.
        rtd_loss: Loss of the discriminator, detached and unweighted.
        corrupted_ids: (batch, length) input of the discriminator, with samples of the generator at masked positions.
        metrics: "generator_accuracy" (argmax) and "sampled_accuracy" (samples) of the generator, and "rtd_precision",
            "rtd_recall", "rtd_f1" and "rtd_share" of replaced tokens, see `heads.accuracy_counts`; with an adversarial
            generator also "generator_reward", the discriminator's mean loss at the masked positions.
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

    `electra` and the heads at the top level belong to the discriminator; `generator` is a `CtxElectraForMaskedLM`. The
    other classes of the family load the discriminator of a joint checkpoint; `export_generator` saves the generator.
    """

    loss_targets: ClassVar[tuple[str, ...]] = ("labels", "token_labels")
    accepts_loss_kwargs = False

    def build_head(self, config: CtxElectraConfig) -> None:
        """Create the discriminator's heads and the generator, tied according to `config.tie_generator`.

        The heads have the names of the other classes of the family, which can load a joint checkpoint.
        """
        if config.discriminator_task in ("detection", "detection_masked"):
            self.rtd_head = DetectionHead(config.hidden_size, activation=config.hidden_act)
        else:
            self.mlm_head = build_mlm_head(config, config.embedding_size, activation="gelu")
            self.output_layer_name = "mlm_head.decoder"
        if config.discriminator_task == "all_tokens_mlm":
            self.copy_gate = nn.Linear(config.hidden_size, 1)
        self.generator = CtxElectraForMaskedLM(config.generator_config())
        if config.generator_task == "adversarial":
            self.reward_baseline = nn.Linear(self.generator.config.hidden_size, 1)
        shared_weights = _shared_weights(config.tie_generator, [name for name, _ in self.electra.named_parameters()])
        self._tied_weights_keys = {f"generator.electra.{name}": f"electra.{name}" for name in shared_weights}
        if self.output_layer_name is not None and config.tie_word_embeddings:
            self._tied_weights_keys[f"{self.output_layer_name}.weight"] = "electra.embeddings.word_embeddings.weight"

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
        """Untie adapted embeddings of the discriminator and of the generator, see `core.adapter_support`.

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
        token_labels = self.validate_token_targets(token_labels, "token_labels", input_ids)
        for name, targets in {"labels": labels, "token_labels": token_labels}.items():
            if targets is not None:
                check_classes(targets, self.config.vocab_size, name, "vocab_size")
        if sampling_seed is not None:
            sampling_seed = validate_targets(sampling_seed, "sampling_seed", input_ids.shape[:1])
        masked = mask_of_targets(labels)
        is_adversarial = self.config.generator_task == "adversarial"
        trains_generator = torch.is_grad_enabled() and not self.config.freeze_generator
        with torch.set_grad_enabled(trains_generator):
            generated = self.generator.encode(input_ids=input_ids, output_mask=masked, **inputs)
        with torch.set_grad_enabled(trains_generator and not is_adversarial):
            corrupted = fill_masked(
                generated.last_hidden_state, self.generator.mlm_head, input_ids, labels, sampling_seed
            )
        if token_labels is None:
            token_labels = on_host(torch.where, masked, labels, input_ids)
            token_labels = ignore_padding(token_labels, padding_mask_or_none(attention_mask), sequence_ids)
        masked_only = self.config.discriminator_task in ("detection_masked", "replace_mlm")
        name, targets = ("labels", labels) if masked_only else ("token_labels", token_labels)
        output_mask, is_target = self.target_output_mask(return_logits, targets), mask_of_targets(targets)
        is_on_device = corrupted.input_ids.device.type != "cpu" and not is_traced(input_ids)
        if is_on_device:  # samples are in the vocabulary: the checks see the masked ids, and read nothing
            set_host_copy(corrupted.input_ids, host_copy(input_ids))
        outputs = self.encode(input_ids=corrupted.input_ids, output_mask=output_mask, **inputs, **kwargs)
        if is_on_device:
            set_host_copy(corrupted.input_ids, None)
        states = outputs.last_hidden_state
        states = select_true(states, is_target) if output_mask is None else states
        corrupted_ids = select_true(corrupted.input_ids, is_target)
        total, metrics = self._discriminator_loss(states, corrupted_ids, select_true(token_labels, is_target))
        num_correct_samples = ((corrupted.input_ids == labels) & masked).sum()
        metrics["generator_accuracy"] = torch.stack([corrupted.correct, masked.sum()]).float()
        metrics["sampled_accuracy"] = torch.stack([num_correct_samples, masked.sum()]).float()
        mlm_loss = mean_over_targets(corrupted.loss, labels, "labels", num_items_in_batch)
        rtd_loss = mean_over_targets(total, targets, name, num_items_in_batch)
        loss = self.config.discriminator_weight * rtd_loss
        if is_adversarial:
            policy_loss, baseline_loss, metrics["generator_reward"] = self._adversarial_losses(
                generated.last_hidden_state,
                select_true(states, select_true(masked, is_target)),
                select_true(corrupted.input_ids, masked),
                select_true(labels, masked),
            )
            loss = loss + mean_over_targets(policy_loss + baseline_loss, labels, "labels", num_items_in_batch)
        elif not self.config.freeze_generator:
            loss = mlm_loss + loss
        return CtxElectraForPreTrainingOutput(
            loss=loss,
            logits=self._logits(outputs) if output_mask is None else None,
            mlm_loss=mlm_loss.detach(),
            rtd_loss=rtd_loss.detach(),
            corrupted_ids=corrupted.input_ids,
            metrics=metrics,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    @property
    def _head_name(self) -> str:
        return "mlm_head" if self.output_layer_name else "rtd_head"

    def _logits(self, outputs: Any) -> Tensor:
        return self.get_submodule(self._head_name)(outputs.last_hidden_state)

    def _discriminator_loss(
        self, states: Tensor, corrupted_ids: Tensor, original_ids: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The summed loss in nats of (tokens, hidden) states, and the counts for `metrics` of the output."""
        if self.config.discriminator_task == "replace_mlm":
            return self.mlm_head.summed_loss(states, original_ids), {}
        if self.config.discriminator_task == "all_tokens_mlm":
            gate = self.copy_gate(states).squeeze(-1)
            return copy_or_predict_loss(self.mlm_head, gate, states, corrupted_ids, original_ids), {}
        logits, replaced = self.rtd_head(states), corrupted_ids != original_ids
        counts = detection_counts(logits.detach(), replaced)
        return detection_loss(logits, replaced), {f"rtd_{name}": count for name, count in counts.items()}

    def _adversarial_losses(
        self, generator_states: Tensor, states: Tensor, samples: Tensor, original_ids: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """REINFORCE for the generator (appendix F): its reward for a sample is the loss of the discriminator at that
        position, as if it depended on no other sample, and the expectation is over a single sample. The gradient is
        the one of (R - b) log p(sample): R is -log D for a sample that equals the original token, else -log(1 - D),
        and the baseline b is -log sigmoid(w h) of the generator's state h, trained by cross-entropy to match R.

        The paper leaves open whether the baseline also trains the generator's encoder; here it does not.

        Args:
            generator_states, states: (masked tokens, hidden) states of the generator and of the discriminator.
            samples, original_ids: (masked tokens,).

        Returns:
            The summed losses of the generator and of the learned baseline, and the sum and number of the rewards.
        """
        with torch.no_grad():
            is_replaced = (samples != original_ids).float()
            logits = self.rtd_head(states).float()
            rewards = F.binary_cross_entropy_with_logits(logits, is_replaced, reduction="none")
        # the baseline is -log sigmoid(w h), and the target of its cross-entropy the probability behind the reward
        baseline_logits = self.reward_baseline(generator_states.detach()).squeeze(-1).float()
        baseline_loss = F.binary_cross_entropy_with_logits(baseline_logits, (-rewards).exp(), reduction="sum")
        advantages = rewards + F.logsigmoid(baseline_logits.detach())
        policy_loss = self.generator.mlm_head.summed_loss(generator_states, samples, advantages)
        return policy_loss, baseline_loss, torch.stack([rewards.sum(), rewards.new_tensor(float(len(rewards)))])

    def export_reference(self, save_directory: str | Path) -> None:
        """Export the discriminator."""
        self.export_discriminator(save_directory)

    def export_discriminator(self, save_directory: str | Path) -> None:
        """Export the discriminator as `transformers.ElectraForPreTraining`: weights (bit-exact) and config.json.

        A discriminator with a task over the vocabulary (`discriminator_task`) is exported as `ElectraForMaskedLM`,
        without its copy gate.
        """
        model_class = CtxElectraForMaskedLM if self.output_layer_name else CtxElectraForReplacedTokenDetection
        with torch.device("meta"):
            discriminator = model_class(self.config)
        discriminator.electra = self.electra
        discriminator.set_submodule(self._head_name, self.get_submodule(self._head_name))
        discriminator.export_reference(save_directory)

    def export_generator(self, save_directory: str | Path) -> None:
        """Export the generator as `transformers.ElectraForMaskedLM`: weights (bit-exact) and config.json."""
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
            generator, discriminator: Directories or Hub ids; the generator has a masked-LM head, the discriminator has
                any head (the generator's in two-stage training, section 3.2); a missing detection head is initialized.
            tie_generator: See `CtxElectraConfig`. None ties the embeddings if they are equal in both checkpoints, else
                no weights (with a warning).
            changes: Other fields of the configuration.

        Raises:
            CtxError: The checkpoints do not match.
        """
        generator_model = _load(CtxElectraForMaskedLM, generator, "mlm_head.", "electra.")
        discriminator_model = _load(CtxElectraForReplacedTokenDetection, discriminator, "electra.")
        generator_config, discriminator_config = generator_model.config, discriminator_model.config
        vocab_sizes = (generator_config.vocab_size, discriminator_config.vocab_size)
        _check_same_vocabulary(vocab_sizes, generator, discriminator)
        with convert_config_errors():
            config = discriminator_config.with_generator(
                generator_config, tie_generator=tie_generator or "embeddings", **changes
            )
        weights, generator_weights = discriminator_model.electra.state_dict(), generator_model.electra.state_dict()
        differing = [
            name
            for name in _shared_weights(config.tie_generator, list(weights))
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
            with convert_config_errors():
                config = discriminator_config.with_generator(generator_config, tie_generator="none", **changes)
        model = cls(config).to(discriminator_model.dtype)
        model.electra.load_state_dict(weights)
        model.generator.load_state_dict(generator_model.state_dict())
        if hasattr(model, "rtd_head"):
            model.rtd_head.load_state_dict(discriminator_model.rtd_head.state_dict())
        return model.eval()


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


def _check_same_vocabulary(sizes: tuple[int, int], *sources: str | PathLike[str]) -> None:
    """Raise CtxError if the vocabularies of generator and discriminator differ, in size or in the saved tokenizers."""
    problem, directories = None, [Path(source) for source in sources]
    if sizes[0] != sizes[1]:
        problem = f"The generator has a vocabulary of {sizes[0]} tokens, the discriminator of {sizes[1]}."
    elif all((path / "tokenizer.json").exists() or (path / "vocab.txt").exists() for path in directories):
        first, second = (AutoTokenizer.from_pretrained(path).get_vocab() for path in directories)
        token = next((token for token in {**first, **second} if first.get(token) != second.get(token)), None)
        if token is not None:
            ids = f"{first.get(token)} in the generator and {second.get(token)} in the discriminator"
            problem = f"The vocabularies differ: {token!r} has id {ids}."
    if problem is not None:
        hint = "use a generator and a discriminator that were trained with the same tokenizer."
        raise CtxError(problem, location=", ".join(map(str, sources)), hint=hint)
