"""Heads that predict masked tokens, alone or together with the relation of a pair of segments."""

import inspect
from collections.abc import Callable
from dataclasses import field, make_dataclass
from functools import wraps
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.modeling_outputs import MaskedLMOutput
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from hf_ctxmodels.heads.base import (
    IGNORED,
    HeadModel,
    ItemCounts,
    accuracy_counts,
    cross_entropy_over_targets,
    language_modeling_loss,
    loss_of_logits,
)
from hf_ctxmodels.layers.lm_loss.chunked import MaskedPredictionHead


class ForMaskedLM(HeadModel):
    """Predicts masked tokens (Devlin et al. 2019, section 3.1).

    With `labels`, the last layer and the vocabulary logits are computed at the labelled positions alone, and `logits`
    is None, unless the logits of all positions are asked for as well (`returns_logits`); without labels, `logits` is
    full.

    Attributes:
        transform_activation: Activation of the head's dense layer; None for `config.hidden_act`.
    """

    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)
    transform_activation: ClassVar[str | None] = None
    output_layer = "mlm_head.decoder"

    def build_head(self, config: Any) -> None:
        """The masked-LM head; its decoder is as wide as the word embeddings."""
        self.mlm_head = MaskedPredictionHead(
            config.hidden_size,
            self.get_input_embeddings().embedding_dim,
            config.vocab_size,
            activation=self.transform_activation or config.hidden_act,
            layer_norm_eps=config.layer_norm_eps,
        )

    def masked_lm(
        self, states: Tensor, labels: Tensor | None, counts: ItemCounts, everywhere: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """The mean cross-entropy in nats at the labelled positions, and the logits; None for what is not there.

        Args:
            states: The encoder's output: (batch, length, hidden) where logits are to be returned, else (targets,
                hidden) at the positions where `labels` is not -100.
            labels: (batch, length), or None.
            counts: As in `mean_over_targets`.
            everywhere: Whether to return logits.
        """
        head = self.mlm_head
        if everywhere:
            logits = head(states)
            return None if labels is None else loss_of_logits(logits, labels, counts), logits
        assert labels is not None
        return language_modeling_loss(head.decoder, states, labels, counts, summed_loss=head.summed_loss), None

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
        num_items_in_batch: ItemCounts = None,
        return_logits_with_labels: bool | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Masked-LM logits, or the loss where `labels` (batch, length; -100 is ignored) are given; for
        `return_logits_with_labels` see `returns_logits`."""
        everywhere = labels is None or self.returns_logits(return_logits_with_labels)
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            sequence_ids=sequence_ids,
            output_mask=None if everywhere else labels != IGNORED,
            **kwargs,
        )
        loss, logits = self.masked_lm(outputs.last_hidden_state, labels, num_items_in_batch, everywhere)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class ForMaskedLMWithPair(ForMaskedLM):
    """Predicts masked tokens, and classifies how the two segments of a pair belong together.

    The loss is the sum of the terms whose targets are given, each a mean over its own targets: Trainer's single
    `num_items_in_batch` cannot describe two terms, so the head does not accept it (`accepts_loss_kwargs`).

    A family names the pair's target and its logits, creates the classifier in `build_head` and applies it in
    `classify_pair`. From the names follow, once for every such class, `loss_targets`, the name of the argument in
    `forward` and in its signature, and `output_class`. With the target "next_sentence_label" the output has
    "next_sentence_loss", and its `metrics` "next_sentence_accuracy".

    Attributes:
        pair_label: The argument of `forward` for the pair's target.
        pair_logits: The output's field for the pair's logits.
        output_class: The class of the output, see `pair_output_class`.
    """

    pools = True
    accepts_loss_kwargs = False
    pair_label: ClassVar[str]
    pair_logits: ClassVar[str]
    output_class: ClassVar[type[ModelOutput]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Derive from the pair's names what depends on them."""
        super().__init_subclass__(**kwargs)
        if "pair_label" in vars(cls):
            cls.loss_targets = ("labels", cls.pair_label)
            cls.output_class = pair_output_class(cls, cls.pair_logits, cls._pair_task())
            if "forward" not in vars(cls):
                cls.forward = renamed_argument(  # type: ignore[method-assign]
                    ForMaskedLMWithPair.forward, "pair_label", cls.pair_label
                )

    @classmethod
    def _pair_task(cls) -> str:
        return cls.pair_label.removesuffix("_label")

    def classify_pair(self, pooled: Tensor) -> Tensor:
        """(batch, hidden) pooled output -> (batch, classes) logits."""
        raise NotImplementedError

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        pair_label: Tensor | None = None,
        num_items_in_batch: ItemCounts = None,
        return_logits_with_labels: bool | None = None,
        **kwargs: Any,
    ) -> ModelOutput:
        """Logits of both heads, and the loss; see `pair_output_class`.

        Args:
            labels: (batch, length) ids of the masked tokens, -100 elsewhere; given, the last layer and the vocabulary
                logits are computed only there, and `prediction_logits` is None.
            pair_label: (batch,) the class of each pair, under the name that the class gives it.
            num_items_in_batch: As in `mean_over_targets`.
            return_logits_with_labels: Compute them everywhere all the same, see `returns_logits`.
            kwargs: What the encoder takes.
        """
        everywhere = labels is None or self.returns_logits(return_logits_with_labels)
        outputs = self.encode(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            output_mask=None if everywhere else labels != IGNORED,
            **kwargs,
        )
        found: dict[str, Any] = {self.pair_logits: self.classify_pair(outputs.pooler_output)}
        terms = {}
        given = (outputs.last_hidden_state, labels, num_items_in_batch, everywhere)
        mlm_loss, found["prediction_logits"] = self.masked_lm(*given)
        if mlm_loss is not None:
            terms["mlm_loss"] = mlm_loss
        if pair_label is not None:
            logits, targets = found[self.pair_logits], pair_label.view(-1)
            loss = cross_entropy_over_targets(logits, targets, self.pair_label, num_items_in_batch)
            terms[f"{self._pair_task()}_loss"] = loss
            found["metrics"] = {f"{self._pair_task()}_accuracy": accuracy_counts(logits, targets)}
        return self.output_class(
            loss=torch.stack([*terms.values()]).sum() if terms else None,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **found,
            **{name: term.detach() for name, term in terms.items()},
        )


def pair_output_class(model_class: type, pair_logits: str, pair_task: str) -> type[ModelOutput]:
    """The output of a head that predicts masked tokens and classifies pairs, with the fields of its own task.

    Its fields, in this order: `loss`, the sum of the terms whose targets were given; `prediction_logits` (batch,
    length, vocabulary), with `labels` as `returns_logits` says; the logits (batch, classes) of the pairs; `mlm_loss`
    and the pairs' loss, each a cross-entropy in nats, detached; `metrics`, the pairs' accuracy as in `accuracy_counts`,
    None without such targets; `hidden_states` and `attentions` as requested.

    Args:
        model_class: The head; the class is called like it, with "Output" appended.
        pair_logits: Name of the field for the pair's logits.
        pair_task: "next_sentence" for the fields "next_sentence_loss" and the like.
    """
    name = f"{model_class.__name__}Output"
    own = (pair_logits, "mlm_loss", f"{pair_task}_loss")
    fields: list[tuple[str, Any]] = [(each, Tensor | None) for each in ("loss", "prediction_logits", *own)]
    fields += [("metrics", dict[str, Tensor] | None)]
    fields += [(each, tuple[Tensor, ...] | None) for each in ("hidden_states", "attentions")]
    namespace = {"__module__": model_class.__module__, "__doc__": f"Output of `{model_class.__name__}`."}
    with_defaults = [(each, kind, field(default=None)) for each, kind in fields]
    return make_dataclass(name, with_defaults, bases=(ModelOutput,), namespace=namespace)


def renamed_argument(function: Callable, old: str, new: str) -> Callable:
    """The function with one of its arguments under another name, which its signature shows (Trainer reads it)."""
    signature = inspect.signature(function)
    parameters = [each.replace(name=new) if each.name == old else each for each in signature.parameters.values()]

    @wraps(function)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        if new in kwargs:
            kwargs[old] = kwargs.pop(new)
        return function(*args, **kwargs)

    renamed.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return renamed
