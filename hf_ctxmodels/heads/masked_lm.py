"""Heads for masked language modelling, alone or with the classification of a pair of segments."""

import inspect
from collections.abc import Callable, Iterable
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
    row_targets,
)
from hf_ctxmodels.layers.lm_loss.chunked import MaskedPredictionHead


class ForMaskedLM(HeadModel):
    """Predicts masked tokens (Devlin et al. 2019, section 3.1).

    With `labels`, the last layer and the vocabulary logits are computed at the labelled positions only, and `logits` is
    None, unless `returns_logits`.

    Attributes:
        transform_activation: Activation of the head's dense layer; None for `config.hidden_act`.
    """

    loss_targets: ClassVar[tuple[str, ...]] = ("labels",)
    transform_activation: ClassVar[str | None] = None
    output_layer = "mlm_head.decoder"

    def build_head(self, config: Any) -> None:
        """The masked-LM head; its decoder has the width of the word embeddings."""
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
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Logits, or the loss with `labels` (batch, length); -100 is ignored. For `return_logits` see
        `returns_logits`."""
        labels = self.token_targets(labels, "labels", input_ids, inputs_embeds)
        everywhere = labels is None or self.returns_logits(return_logits)
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
    """Predicts masked tokens, and classifies the pair of segments.

    The loss is the sum of the terms with targets, each a mean over its own targets: Trainer's single
    `num_items_in_batch` cannot describe two terms, so the head does not accept it (`accepts_loss_kwargs`).

    A family sets the names of the pair's label and logits, creates the classifier in `build_head` and applies it in
    `classify_pair`. `loss_targets`, the signature of `forward` and `output_class` follow from the names: with
    "next_sentence_label" the output has "next_sentence_loss", and its `metrics` "next_sentence_accuracy".

    Attributes:
        pair_label: The argument of `forward` for the pair's label.
        pair_logits: The output's field for the pair's logits.
        output_class: The class of the output, see `pair_output_class`.
    """

    pools = True
    accepts_loss_kwargs = False
    pair_label: ClassVar[str]
    pair_logits: ClassVar[str]
    output_class: ClassVar[type[ModelOutput]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Set the attributes that depend on the pair's names."""
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
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> ModelOutput:
        """Logits of both heads, and the loss; see `pair_output_class`.

        Args:
            labels: (batch, length) ids of the masked tokens, -100 elsewhere; the last layer and the vocabulary logits
                are then computed only there, and `prediction_logits` is None.
            pair_label: (batch,) the class of each pair, under the family's name.
            num_items_in_batch: As in `mean_over_targets`.
            return_logits: See `returns_logits`.
            kwargs: Arguments of the encoder.
        """
        labels = self.token_targets(labels, "labels", input_ids, inputs_embeds)
        everywhere = labels is None or self.returns_logits(return_logits)
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
            logits = found[self.pair_logits]
            targets = row_targets(pair_label, self.pair_label, len(logits))
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
    """The output class of a head that predicts masked tokens and classifies pairs.

    Its fields, in this order: `loss`, the sum of the terms with targets; `prediction_logits` (batch, length,
    vocabulary), with `labels` only if `returns_logits`; the logits (batch, classes) of the pairs; `mlm_loss` and the
    pairs' loss, each a cross-entropy in nats, detached; `metrics`, the pairs' accuracy as in `accuracy_counts`, None
    without labels; `hidden_states` and `attentions` as requested.

    Args:
        model_class: The head, whose name plus "Output" is the name of the class.
        pair_logits: Name of the field for the pair's logits.
        pair_task: For example "next_sentence" for the field "next_sentence_loss".
    """
    own = (pair_logits, "mlm_loss", f"{pair_task}_loss")
    name, text = model_class.__name__, f"Output of `{model_class.__name__}`."
    return pretraining_output_class(f"{name}Output", model_class.__module__, own, text)


def pretraining_output_class(name: str, module: str, own: Iterable[str], text: str) -> type[ModelOutput]:
    """An output class with the fields `loss`, `prediction_logits`, those in `own`, `metrics`, `hidden_states` and
    `attentions`, in this order.

    Args:
        name, module, text: Of the class, `text` being its docstring.
        own: Names of the tensors that the head has beside the others.
    """
    fields: list[tuple[str, Any]] = [(each, Tensor | None) for each in ("loss", "prediction_logits", *own)]
    fields += [("metrics", dict[str, Tensor] | None)]
    fields += [(each, tuple[Tensor, ...] | None) for each in ("hidden_states", "attentions")]
    with_defaults = [(each, kind, field(default=None)) for each, kind in fields]
    return make_dataclass(name, with_defaults, bases=(ModelOutput,), namespace={"__module__": module, "__doc__": text})


def renamed_argument(function: Callable, old: str, new: str) -> Callable:
    """The function with an argument renamed, also in its signature, which Trainer inspects."""
    signature = inspect.signature(function)
    parameters = [each.replace(name=new) if each.name == old else each for each in signature.parameters.values()]

    @wraps(function)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        if new in kwargs:
            kwargs[old] = kwargs.pop(new)
        return function(*args, **kwargs)

    renamed.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return renamed
