"""Search for a universal trigger: gradient of the trigger's embeddings, first-order candidates, beam search.

Wallace et al. 2019 (arXiv 1908.07125), section 2. The trigger is inserted into the texts, so that the tokenizer adds
its special tokens before it, and its positions are those at which two encodings with different marker tokens differ.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.console import progress_bar
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range, flag
from hf_ctxmodels.core.host_copies import CollatedBatch
from hf_ctxmodels.core.model import evaluation_mode
from hf_ctxmodels.downstream.tasks.base import Collator, Feature

Trigger = list[int]
"""Token ids of a trigger."""
_UNUSED = re.compile(r"\W*unused[\W_]*\d+\W*", re.IGNORECASE)


@dataclass
class TriggerOptions:
    """Search."""

    length: int = flag(3, "Number of tokens of a trigger.")
    candidates: int = flag(40, "Number of tokens to try at each position, by the first-order change of the loss.")
    beam_size: int = flag(1, "Number of triggers in the beam.")
    epochs: int = flag(5, "Maximum number of passes over the texts; the search ends without improvement.")
    batch_size: int = flag(64, "Texts per batch.")

    def __post_init__(self) -> None:
        check_range(self, "length", "candidates", "beam_size", "epochs", "batch_size", at_least=1)


def decode_tokens(tokenizer: PreTrainedTokenizerBase, sequences: Sequence[Trigger]) -> list[str]:
    """Texts of sequences of tokens."""
    return [tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in sequences]


def reproducible_triggers(tokenizer: PreTrainedTokenizerBase, sequences: Sequence[Trigger]) -> list[Trigger]:
    """The sequences of tokens whose text is encoded as the same tokens."""
    if not sequences:
        return []
    encoding = tokenizer(decode_tokens(tokenizer, sequences), add_special_tokens=False, verbose=False)
    return [sequence for sequence, ids in zip(sequences, encoding["input_ids"], strict=True) if list(ids) == sequence]


def trigger_vocabulary(
    tokenizer: PreTrainedTokenizerBase, length: int, excluded_words: Collection[str] = ()
) -> list[int]:
    """Tokens that a trigger may contain: no special or unused token, no token that continues a word (a sequence of
    `length` copies must survive decoding and encoding), and none of the lower-cased `excluded_words`.

    Raises:
        CtxError: Fewer than 2 `length` tokens remain.
    """
    excluded_ids = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ids = [index for index in range(len(tokenizer)) if index not in excluded_ids]
    texts = decode_tokens(tokenizer, [[index] for index in ids])
    ids = [
        index
        for index, text in zip(ids, texts, strict=True)
        if text.strip() and not _UNUSED.fullmatch(text) and text.strip().lower() not in excluded_words
    ]
    vocabulary = [index for index, *_ in reproducible_triggers(tokenizer, [[index] * length for index in ids])]
    if len(vocabulary) < 2 * length:
        raise CtxError(
            f"The vocabulary has {len(vocabulary)} tokens that are whole words, and a trigger of {length} tokens needs "
            f"{2 * length}.",
            location=type(tokenizer).__name__,
            hint="use shorter triggers, or a model with a larger vocabulary.",
        )
    return vocabulary


@dataclass(frozen=True)
class TriggerBatch:
    """A batch with a trigger.

    Attributes:
        inputs: Arguments of the model, with marker tokens at the positions of the trigger.
        slots: (trigger, *input_ids.shape) bool, the positions of each token of the trigger.
        rows: For each call of the embedding layer, (trigger, *ids.shape) bool, the rows of each token of the trigger.
    """

    inputs: dict[str, Tensor]
    slots: Tensor
    rows: list[Tensor]

    def with_trigger(self, trigger: Trigger) -> dict[str, Tensor]:
        """Arguments of the model with a trigger."""
        ids = self.inputs["input_ids"].clone()
        for slot, token in zip(self.slots, trigger, strict=True):
            ids[slot] = token
        return {**self.inputs, "input_ids": ids}


class TriggerSearch:
    """Search for the trigger that maximizes (or minimizes) the loss of a model on some texts.

    Args:
        model, tokenizer: A model with a loss whose inputs are ids of tokens.
        encode: Returns the features of the texts with a trigger.
        collate: The collator of features.
        increases_loss: Whether to maximize the loss (of correct labels), or minimize it (of the attack's targets).
        excluded_words: Lower-cased words that a trigger must not contain.

    Raises:
        CtxError: The model has no token embeddings, or an encoded text does not contain the trigger.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        encode: Callable[[Trigger], Sequence[Feature]],
        collate: Collator,
        options: TriggerOptions,
        *,
        increases_loss: bool = True,
        excluded_words: Collection[str] = (),
    ) -> None:
        if getattr(model, "token_id_axes", ()):
            raise CtxError(
                f"{type(model).__name__} reads characters, but the search needs token embeddings.",
                location=model.name_or_path,
                hint="attack a model of words or subwords, and measure the transfer to this one.",
            )
        self.model, self.tokenizer, self.options = model, tokenizer, options
        self.sign = 1.0 if increases_loss else -1.0
        self.vocabulary = trigger_vocabulary(tokenizer, options.length, excluded_words)
        self.embeddings: Any = model.get_input_embeddings()
        with evaluation_mode(model):
            every_id = torch.tensor(self.vocabulary, device=next(self.embeddings.parameters()).device)
            self.table: Tensor = self.embeddings(every_id[None])[0].float()
        self.batches = self._make_batches(encode, collate)

    @property
    def start(self) -> Trigger:
        """The trigger that the search starts from: "the", or the first word of the vocabulary, repeated."""
        words = self._words()
        return [self.vocabulary[words.index("the") if "the" in words else 0]] * self.options.length

    def _make_batches(self, encode: Callable[[Trigger], Sequence[Feature]], collate: Collator) -> list[TriggerBatch]:
        markers = self._markers()
        first, second = map(encode, markers)
        size = self.options.batch_size
        chunks = (slice(start, start + size) for start in range(0, len(first), size))
        return [self._make_batch(collate(list(first[rows])), collate(list(second[rows])), markers) for rows in chunks]

    def _make_batch(
        self, inputs: dict[str, Tensor], other_inputs: dict[str, Tensor], markers: Sequence[Trigger]
    ) -> TriggerBatch:
        """Locate the trigger in a batch that is encoded with both markers."""
        ids, other_ids = inputs["input_ids"], other_inputs["input_ids"]
        slots = _marked(ids, other_ids, markers) if ids.shape == other_ids.shape else None
        if slots is None or not slots.flatten(2).any(2).all():
            raise CtxError(
                f"The encoded texts do not contain the {len(markers[0])} tokens of the trigger.",
                location=self.model.name_or_path,
                hint="raise --max_length, or use a shorter trigger.",
            )
        calls, other_calls = self._embedded_ids(inputs), self._embedded_ids({**inputs, "input_ids": other_ids})
        if not calls:
            raise CtxError(
                f"{type(self.model).__name__} does not compute its inputs with get_input_embeddings().",
                location=self.model.name_or_path,
                hint="attack another model.",
            )
        rows = [_marked(*row_ids, markers) for row_ids in zip(calls, other_calls, strict=True)]
        return TriggerBatch(dict(inputs), slots, rows)

    def _markers(self) -> list[Trigger]:
        """Two triggers of different tokens, words of letters if possible."""
        length, words = self.options.length, self._words()
        order = sorted(range(len(words)), key=lambda index: not words[index].isalpha())
        tokens = [self.vocabulary[index] for index in order]
        return [tokens[:length], tokens[length : 2 * length]]

    def _words(self) -> list[str]:
        """The lower-cased text of each token of the vocabulary."""
        return [text.strip().lower() for text in decode_tokens(self.tokenizer, [[index] for index in self.vocabulary])]

    def _embedded_ids(self, inputs: dict[str, Tensor]) -> list[Tensor]:
        """The ids of each call of the embedding layer in a forward pass, in the layout of the model."""
        calls: list[Tensor] = []
        handle = self.embeddings.register_forward_pre_hook(lambda _, args: calls.append(args[0].detach().clone()))
        try:
            self.losses([inputs])
        finally:
            handle.remove()
        return calls

    def losses(self, inputs: Sequence[dict[str, Tensor]]) -> list[float]:
        """Losses of batches."""
        with evaluation_mode(self.model):
            return [float(self.model(**CollatedBatch(batch).to(self.model.device)).loss) for batch in inputs]

    def gradient(self, batch: TriggerBatch, trigger: Trigger) -> Tensor:
        """(trigger, width) gradient of the loss with respect to the embeddings of the trigger, summed over the batch
        and over the calls of the embedding layer (the decoder of an encoder-decoder reads the text, too)."""
        outputs: list[Tensor] = []

        def replace_output(module: Any, args: Any, output: Tensor) -> Tensor:
            outputs.append(output.detach().requires_grad_())
            return outputs[-1].clone()

        inputs = CollatedBatch(batch.with_trigger(trigger)).to(self.model.device)
        handle = self.embeddings.register_forward_hook(replace_output)
        try:
            # cuDNN computes no gradients of recurrent layers in evaluation mode
            with evaluation_mode(self.model), torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
                loss = self.model(**inputs).loss
                gradients = torch.autograd.grad(loss, outputs, allow_unused=True)
        finally:
            handle.remove()
        total = torch.zeros(len(trigger), self.table.shape[1], device=self.table.device)
        for rows, gradient in zip(batch.rows, gradients, strict=True):
            if gradient is not None:
                total += torch.stack([gradient[row].sum(0) for row in rows.to(gradient.device)]).float()
        return total

    def candidates(self, batch: TriggerBatch, trigger: Trigger) -> list[list[int]]:
        """For each position of the trigger, the tokens whose embeddings e change the loss most in the direction of the
        attack, to first order: largest (e - e_current) . gradient (equation 2; the current embedding is constant)."""
        scores = self.sign * self.gradient(batch, trigger) @ self.table.T
        top = scores.topk(min(self.options.candidates, len(self.vocabulary)), dim=1).indices
        return [[self.vocabulary[index] for index in row] for row in top.tolist()]

    def step(self, batch: TriggerBatch, trigger: Trigger) -> Trigger:
        """Improve a trigger on a batch: a beam search over the positions, with the true losses of the candidates. Only
        triggers that survive decoding and encoding are considered."""
        candidates = self.candidates(batch, trigger)
        beam = [(self.sign * self.losses([batch.with_trigger(trigger)])[0], trigger)]
        for position, tokens in enumerate(candidates):
            sequences = {tuple(sequence) for _, sequence in beam}
            expanded = []
            for _, sequence in beam:
                for token in tokens:
                    changed = (*sequence[:position], token, *sequence[position + 1 :])
                    if changed not in sequences:
                        sequences.add(changed)
                        expanded.append(list(changed))
            expanded = reproducible_triggers(self.tokenizer, expanded)
            losses = self.losses([batch.with_trigger(sequence) for sequence in expanded])
            beam += [(self.sign * loss, sequence) for loss, sequence in zip(losses, expanded, strict=True)]
            beam = sorted(beam, key=lambda entry: -entry[0])[: self.options.beam_size]
        return beam[0][1]

    def mean_loss(self, trigger: Trigger) -> float:
        """Loss of all texts with a trigger."""
        losses = self.losses([batch.with_trigger(trigger) for batch in self.batches])
        sizes = [len(batch.inputs["input_ids"]) for batch in self.batches]
        return sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)

    def run(self, description: str = "trigger") -> Trigger:
        """The best trigger after `epochs` passes over the texts; a pass without improvement ends the search."""
        trigger = best = self.start
        best_loss = self.mean_loss(best)
        for epoch in range(self.options.epochs):
            for batch in progress_bar(self.batches, f"{description}, pass {epoch + 1}", unit="batches"):
                trigger = self.step(batch, trigger)
            loss = self.mean_loss(trigger)
            if self.sign * (loss - best_loss) <= 0:
                break
            best, best_loss = trigger, loss
        return best


def _marked(ids: Tensor, other_ids: Tensor, markers: Sequence[Trigger]) -> Tensor:
    """(trigger, *ids.shape) bool: where `ids` and `other_ids` have the tokens of the first and the second marker."""
    return torch.stack([(ids == a) & (other_ids == b) for a, b in zip(*markers, strict=True)])
