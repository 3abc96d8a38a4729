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
_EMBEDDINGS = "electra.embeddings."
_TABLES = [
    f"{_EMBEDDINGS}{name}"
    for name in (
        *("word_embeddings.weight", "position_embeddings.weight", "token_type_embeddings.weight"),
        *("norm.weight", "norm.bias"),
    )
]


@dataclass
class CtxElectraForPreTrainingOutput(ModelOutput):
    """Output of `CtxElectraForPreTraining`.

    Attributes:
        loss: mlm_loss + discriminator_weight x rtd_loss (section 2).
        logits: The discriminator's logits for its input, `corrupted_ids` (without `labels`, the uncorrupted input):
            (batch, length), positive for replaced tokens; (batch, length, vocabulary) for a task over the vocabulary.
            With `labels`, only if `returns_logits`.
        mlm_loss: The generator's cross-entropy in nats, detached.
        rtd_loss: The discriminator's loss, detached and unweighted.
        corrupted_ids: (batch, length) the discriminator's input: samples of the generator at the masked positions.
        metrics: (numerator, denominator) of "generator_accuracy" (of the largest logit), "sampled_accuracy" (of the
            samples), and of replaced tokens "rtd_precision", "rtd_recall", "rtd_f1" and "rtd_share".
        hidden_states, attentions: Of the discriminator.
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

    The generator replaces masked tokens by samples of its distribution; the discriminator detects the replaced tokens.
    The generator's last layer and head run at the masked positions only; one pass of the head gives loss and samples.

    `electra` and the heads at the top level are the discriminator's; `generator` is a `CtxElectraForMaskedLM`. All
    other classes of the family open the discriminator of a joint checkpoint; `export_generator` writes the generator.
    """

    loss_targets: ClassVar[tuple[str, ...]] = ("labels", "token_labels")
    accepts_loss_kwargs = False

    def build_head(self, config: CtxElectraConfig) -> None:
        """The discriminator's heads and the generator, tied by `config.tie_generator`."""
        self.discriminator_task = DISCRIMINATOR_TASKS[config.discriminator_task]
        self.output_layer = self.discriminator_task.output_layer
        for name, head in self.discriminator_task.build_heads(config).items():
            self.add_module(name, head)
        self.generator = CtxElectraForMaskedLM(config.generator_config())
        shared = {
            "none": [],
            "embeddings": _TABLES,
            "all": [f"electra.{name}" for name, _ in self.electra.named_parameters()],
        }[config.tie_generator]
        self._tied_weights_keys = {f"generator.{name}": name for name in shared}
        if self.output_layer is not None and config.tie_word_embeddings:
            self._tied_weights_keys[f"{self.output_layer}.weight"] = _TABLES[0]

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """The tied weights of generator and discriminator, independent of `tie_word_embeddings`."""
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        return dict(self._tied_weights_keys)

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Tie the weights, and freeze the generator again: loading makes weights trainable."""
        super().tie_weights(*args, **kwargs)
        if self.config.freeze_generator:
            self.generator.requires_grad_(False)

    def untie_adapted_weights(self) -> None:
        """Untie adapted embeddings of the discriminator and of the generator, see `core.peft_support`.

        Raises:
            CtxError: An adapter stands on a weight that both encoders share: merging would change the other one too.
        """
        untie_adapted_embeddings(self)
        if untie_adapted_embeddings(self.generator):
            self.config.generator_overrides = (self.config.generator_overrides or {}) | {"tie_word_embeddings": False}
        shared = {id(each) for each in self.electra.parameters()} & {id(each) for each in self.generator.parameters()}
        if any(id(each.base_layer.weight) in shared for each in self.modules() if hasattr(each, "base_layer")):
            raise CtxError(
                f"An adapter stands on weights that tie_generator={self.config.tie_generator!r} shares: merging it "
                "would change both encoders.",
                hint='adapt other modules, or one of both encoders by itself; or train with tie_generator="none".',
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
        """Both losses with `labels`; without, the discriminator's logits for the uncorrupted input.

        Args:
            labels: (batch, length) original ids of the masked tokens, -100 elsewhere.
            token_labels: (batch, length) original ids of all tokens, -100 at padding, for the discriminator's loss.
                None derives them from `labels` and `input_ids`.
            sampling_seed: (batch,) int64, the seed of each row's samples. None derives it from the row's masked tokens.
            return_logits: See `returns_logits`.
            kwargs: Arguments of the discriminator's encoder.
        """
        inputs = {"attention_mask": attention_mask, "token_type_ids": token_type_ids}
        inputs |= {"position_ids": position_ids, "sequence_ids": sequence_ids}
        labels = self.validate_token_targets(labels, "labels", input_ids, inputs_embeds)
        if labels is None:
            outputs = self.encode(input_ids=input_ids, inputs_embeds=inputs_embeds, **inputs, **kwargs)
            return CtxElectraForPreTrainingOutput(
                logits=self._logits(outputs), hidden_states=outputs.hidden_states, attentions=outputs.attentions
            )
        if input_ids is None or inputs_embeds is not None:
            raise CtxError("The generator replaces tokens, not inputs_embeds.", hint="give input_ids with labels.")
        token_labels = self._checked_token_labels(input_ids, labels, token_labels)
        filled = self._generate(input_ids, labels, sampling_seed, inputs)
        if token_labels is None:
            token_labels = _original_ids(input_ids, labels, attention_mask, sequence_ids)
        name, targets = ("labels", labels) if self.discriminator_task.masked_only else ("token_labels", token_labels)
        read, everywhere = targets != IGNORE_INDEX, self.returns_logits(return_logits)
        outputs = self.encode(input_ids=filled.input_ids, output_mask=None if everywhere else read, **inputs, **kwargs)
        states = outputs.last_hidden_state[read] if everywhere else outputs.last_hidden_state
        total, metrics = self.discriminator_task.loss(self, states, filled.input_ids[read], token_labels[read])
        mlm_loss = mean_over_targets(filled.loss, labels, "labels", num_items_in_batch)
        rtd_loss = mean_over_targets(total, targets, name, num_items_in_batch)
        weighted = self.config.discriminator_weight * rtd_loss
        return CtxElectraForPreTrainingOutput(
            loss=weighted if self.config.freeze_generator else mlm_loss + weighted,
            logits=self._logits(outputs) if everywhere else None,
            mlm_loss=mlm_loss.detach(),
            rtd_loss=rtd_loss.detach(),
            corrupted_ids=filled.input_ids,
            metrics=_generator_counts(filled, labels) | metrics,
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

    def _checked_token_labels(self, input_ids: Tensor, labels: Tensor, token_labels: Any) -> Tensor | None:
        token_labels = self.validate_token_targets(token_labels, "token_labels", input_ids)
        for name, target in {"labels": labels, "token_labels": token_labels}.items():
            if target is not None:
                check_ids(name, target.masked_fill(target == IGNORE_INDEX, 0), self.config.vocab_size, "vocab_size")
        return token_labels

    def export_reference(self, save_directory: str | Path) -> None:
        """Write the discriminator, see `export_discriminator`."""
        self.export_discriminator(save_directory)

    def export_discriminator(self, save_directory: str | Path) -> None:
        """Write weights and a config.json that `transformers.ElectraForPreTraining` opens, bit for bit.

        A discriminator with a task over the vocabulary (`discriminator_task`) becomes an `ElectraForMaskedLM`, without
        its copy gate.

        Args:
            save_directory: Folder to write config.json and model.safetensors to; created if needed.
        """
        name = self.discriminator_task.head_name
        kinds = {"rtd_head": CtxElectraForReplacedTokenDetection, "mlm_head": CtxElectraForMaskedLM}
        with torch.device("meta"):
            part = kinds[name](self.config)
        part.electra = self.electra
        part.set_submodule(name, self.get_submodule(name))
        part.export_reference(save_directory)

    def export_generator(self, save_directory: str | Path) -> None:
        """Write weights and a config.json that `transformers.ElectraForMaskedLM` opens, bit for bit.

        Args:
            save_directory: Folder to write config.json and model.safetensors to; created if needed.
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
        """The joint model of two checkpoints, of `transformers` or of this package.

        Args:
            generator: Directory or Hub id of a masked-LM checkpoint.
            discriminator: Directory or Hub id of a checkpoint with any head, for example the generator (two-stage
                training, section 3.2); a missing detection head is initialised.
            tie_generator: As in the configuration. None ties the embeddings if they are equal in both checkpoints, else
                nothing (with a warning).
            changes: Other fields of the configuration, for example `discriminator_weight` or `freeze_generator`.

        Raises:
            CtxError: The checkpoints do not match.
        """
        first = _open(CtxElectraForMaskedLM, generator, "mlm_head.", "electra.")
        second = _open(CtxElectraForReplacedTokenDetection, discriminator, "electra.")
        _check_same_vocabulary(first.config, second.config, generator, discriminator)
        config = _pair_config(first.config, second.config, tie_generator or "embeddings", changes)
        own, other = second.electra.state_dict(), first.electra.state_dict()
        names = own if config.tie_generator == "all" else [name.removeprefix("electra.") for name in _TABLES]
        if config.tie_generator == "none":
            names = []
        differing = [name for name in names if name not in other or not torch.equal(own[name], other[name])]
        if differing:
            what = f"{differing[0]} differs between generator and discriminator"
            if tie_generator is not None:
                raise CtxError(
                    f"{what}, but tie_generator={tie_generator!r} shares it.",
                    location=f"{generator}, {discriminator}",
                    hint='set tie_generator="none", or give two checkpoints of the same training.',
                )
            logger.warning(f"{what}; no weights are tied (tie_generator='none').")
            config = _pair_config(first.config, second.config, "none", changes)
        model = cls(config).to(second.dtype)
        model.electra.load_state_dict(own)
        model.generator.load_state_dict(first.state_dict())
        if model.discriminator_task.head_name == "rtd_head":
            model.rtd_head.load_state_dict(second.rtd_head.state_dict())
        return model.eval()


def _original_ids(
    input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None, sequence_ids: Tensor | None
) -> Tensor:
    """(batch, length) the ids before masking, -100 at padding."""
    originals = torch.where(labels == IGNORE_INDEX, input_ids, labels)
    for tokens in (attention_mask, sequence_ids):
        if tokens is not None and tokens.dim() == 2:
            originals = originals.masked_fill(tokens == 0, IGNORE_INDEX)
    return originals


def _generator_counts(filled: FilledBatch, labels: Tensor) -> dict[str, Tensor]:
    masked = labels != IGNORE_INDEX
    hits = {"generator_accuracy": filled.correct, "sampled_accuracy": ((filled.input_ids == labels) & masked).sum()}
    return {name: torch.stack([hit, masked.sum()]).float() for name, hit in hits.items()}


def _open(kind: type[CtxElectraHeadModel], source: str | PathLike[str], *needed: str) -> Any:
    """Open a generator or discriminator; raises CtxError if weights with one of the prefixes `needed` are missing."""
    model, report = kind.from_pretrained(source, output_loading_info=True)
    missing = sorted(name for name in report["missing_keys"] if name.startswith(needed))
    if missing or report["mismatched_keys"]:
        raise CtxError(
            f"The checkpoint is no {kind.__name__}: it has no {missing[0] if missing else 'weights of that shape'}.",
            location=str(source),
            hint="a generator is an ElectraForMaskedLM; export it from a joint checkpoint with "
            "export_generator(directory).",
        )
    return model


def _check_same_vocabulary(
    first: CtxElectraConfig,
    second: CtxElectraConfig,
    generator: str | PathLike[str],
    discriminator: str | PathLike[str],
) -> None:
    """Raise a `CtxError` if the vocabularies differ, by their sizes or by the tokenizers saved with the weights."""
    location = f"{generator}, {discriminator}"
    hint = "use a generator and a discriminator that were trained with the same tokenizer."
    if first.vocab_size != second.vocab_size:
        raise CtxError(
            f"The generator has a vocabulary of {first.vocab_size} tokens, the discriminator of {second.vocab_size}.",
            location=location,
            hint=hint,
        )
    folders = [Path(generator), Path(discriminator)]
    if all((folder / "tokenizer.json").exists() or (folder / "vocab.txt").exists() for folder in folders):
        one, other = (AutoTokenizer.from_pretrained(folder).get_vocab() for folder in folders)
        if one != other:
            word = next(word for word in {**one, **other} if one.get(word) != other.get(word))
            raise CtxError(
                f"The vocabularies differ: {word!r} is token {one.get(word)} of the generator and {other.get(word)} of "
                "the discriminator.",
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
