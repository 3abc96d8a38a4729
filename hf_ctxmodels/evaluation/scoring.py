"""Log-probabilities of texts, by language models of every kind."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels import heads
from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model_modes import evaluation_mode
from hf_ctxmodels.evaluation.next_token_loss import predicts_in_any_order

Row = dict[str, Any]


class TextScore(NamedTuple):
    """The score of a text.

    Attributes:
        log_probability: The sum of the log-probabilities of its predictions, in nats.
        predictions: Their number.
    """

    log_probability: float
    predictions: int


def score(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, batch_size: int = 32
) -> list[TextScore]:
    """Score every text by itself: the higher, the more likely the model holds it to be.

    - Causal language models: the log-likelihood, each token given those before it (after it, for a backward model).
    - Masked language models and ELECTRA's generator: the pseudo-log-likelihood (Salazar et al. 2020, arXiv 1910.14659),
      each token given all others, masked one at a time.
    - XLNet: the pseudo-log-likelihood without a mask token; each token is the only target of an order in which all
      others come before it.
    - ELMo: the sum of both directions' log-likelihoods.

    Special tokens are no predictions of a pseudo-log-likelihood. A log-likelihood has every prediction that training
    has: the end of a text where the tokenizer marks it, and the first word after a token that begins it (or ends the
    text before). Scores of different kinds, or of different vocabularies, cannot be compared with each other.

    XLNet's plain forward gives no left-to-right score: without targets its rows see the whole text, themselves too.

    Args:
        model: A model with a language modelling head; its mode is restored.
        tokenizer: Its tokenizer.
        texts: The texts.
        batch_size: Rows per batch; a pseudo-log-likelihood has a row for every token.

    Raises:
        CtxError: The model has no such head, or a text has no token.
    """
    scorer = _scorer(model, tokenizer)
    rows: list[tuple[int, Row]] = []
    for number, text in enumerate(texts):
        own = list(scorer.rows(text))
        if not own:
            raise CtxError(f"Text {number} (counted from 0) has no token: {text!r}.", hint="leave it out.")
        rows.extend((number, row) for row in own)
    rows.sort(key=lambda row: len(row[1]["input_ids"]))
    totals, counts = [0.0] * len(texts), [0] * len(texts)
    with evaluation_mode(model):
        for first in range(0, len(rows), batch_size):
            numbers, batch = zip(*rows[first : first + batch_size], strict=True)
            for number, total, count in zip(numbers, *scorer.run(list(batch)), strict=True):
                totals[number] += total
                counts[number] += count
    return [TextScore(*each) for each in zip(totals, counts, strict=True)]


class _Scorer(ABC):
    """How a kind of model scores."""

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer

    @abstractmethod
    def rows(self, text: str) -> Iterable[Row]:
        """The rows to compute: `input_ids` and others of the tokenizer; and `targets`, or a `position`."""

    @abstractmethod
    def run(self, rows: list[Row]) -> tuple[list[float], list[int]]:
        """The sums of the log-probabilities of rows, and the numbers of predictions."""

    def batch(self, rows: list[Row]) -> dict[str, Tensor]:
        """What the tokenizer made of rows, padded."""
        names = [name for name in self.tokenizer.model_input_names if name in rows[0]]
        padded = self.tokenizer.pad([{name: row[name] for name in names} for row in rows], return_tensors="pt")
        return {name: padded[name].to(self.model.device) for name in names}

    def padded(self, rows: list[Row], like: Tensor) -> Tensor:
        """(batch, length, ...) `targets` of rows where their tokens are in `like`, (batch, length); else -100."""
        sample = torch.tensor(rows[0]["targets"])
        targets = sample.new_full((*like.shape, *sample.shape[1:]), IGNORE_INDEX).to(like.device)
        targets[like != 0] = torch.cat([torch.tensor(row["targets"]) for row in rows]).to(like.device)
        return targets


def _sums(logits: Tensor, targets: Tensor) -> tuple[list[float], list[int]]:
    """(batch, ..., vocabulary) logits, (batch, ...) targets -> sums of log-probabilities, and numbers, of rows."""
    losses = F.cross_entropy(
        logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    sums = -losses.view(len(targets), -1).double().sum(1)
    return sums.tolist(), (targets != IGNORE_INDEX).flatten(1).sum(1).tolist()


class _Causal(_Scorer):
    """Every token from those before it."""

    def rows(self, text: str) -> Iterable[Row]:
        ids = list(self.tokenizer(text, verbose=False)["input_ids"])
        ends = self.tokenizer.eos_token_id
        if ids and ids[0] not in self.tokenizer.all_special_ids and ends is not None and not self.model.is_backward:
            ids = [ends, *ids]  # as where one text follows another
        return [{"input_ids": ids, "attention_mask": [1] * len(ids), "targets": ids}] if len(ids) > 1 else []

    def run(self, rows: list[Row]) -> tuple[list[float], list[int]]:
        batch = self.batch(rows)
        mask = batch["attention_mask"]
        labels = self.padded(rows, mask)
        targets = heads.next_token_targets(labels, labels.shape[1], mask, None, self.model.is_backward)
        return _sums(self.model(**batch).logits, targets)


class _Masked(_Scorer):
    """Every token from all others, by a mask token in its place."""

    def rows(self, text: str) -> Iterable[Row]:
        encoded = self.tokenizer(text, return_special_tokens_mask=True, verbose=False)
        plain = {name: encoded[name] for name in self.tokenizer.model_input_names if name in encoded}
        special = encoded["special_tokens_mask"]
        return [{**plain, "position": place} for place, is_special in enumerate(special) if not is_special]

    def places(self, rows: list[Row], batch: dict[str, Tensor]) -> Tensor:
        """(batch,) columns of the rows' positions in the padded batch."""
        first = batch["attention_mask"].int().argmax(1)
        return first + torch.tensor([row["position"] for row in rows], device=first.device)

    def run(self, rows: list[Row]) -> tuple[list[float], list[int]]:
        batch = self.batch(rows)
        places = self.places(rows, batch)[:, None]
        targets = batch["input_ids"].gather(1, places)
        return _sums(self.logits(batch, places), targets)

    def logits(self, batch: dict[str, Tensor], places: Tensor) -> Tensor:
        """(batch, 1, vocabulary) of the tokens at (batch, 1) columns."""
        ids = batch["input_ids"].scatter(1, places, self.tokenizer.mask_token_id)
        output_mask = torch.zeros_like(ids, dtype=torch.bool).scatter(1, places, True)
        states = self.model.encode(**{**batch, "input_ids": ids}, output_mask=output_mask).last_hidden_state
        return self.model.mlm_head(states, self.model.invertible_adapters)[:, None]


class _Permuted(_Masked):
    """Every token from all others, as the target that comes last in the order."""

    def logits(self, batch: dict[str, Tensor], places: Tensor) -> Tensor:
        """(batch, 1, vocabulary) of the tokens at (batch, 1) columns."""
        order = torch.full_like(batch["input_ids"], -1).scatter(1, places, 0)
        return self.model(**batch, permutation_order=order, target_positions=places).logits


class _BothWays(_Scorer):
    """Every word from those before it, and from those after it; words are read as characters."""

    def rows(self, text: str) -> Iterable[Row]:
        tokenizer: Any = self.tokenizer
        [(numbers, _)] = tokenizer.vocabulary_ids([text])
        ids = [IGNORE_INDEX, *numbers.tolist(), IGNORE_INDEX]
        if len(numbers) <= tokenizer.num_special_tokens_to_add():
            return []
        neighbours = list(zip(ids[2:], ids[:-2], strict=True))
        encoded = tokenizer(text, verbose=False)
        return [{**{name: encoded[name] for name in tokenizer.model_input_names}, "targets": neighbours}]

    def run(self, rows: list[Row]) -> tuple[list[float], list[int]]:
        batch = self.batch(rows)
        return _sums(self.model(**batch).logits, self.padded(rows, batch["attention_mask"]))


def _scorer(model: Any, tokenizer: PreTrainedTokenizerBase) -> _Scorer:
    """By what the model is, or has: ELECTRA's pair has a generator."""
    model = getattr(model, "generator", model)
    if isinstance(model, heads.ForMaskedLM):
        return _Masked(model, tokenizer)
    if isinstance(model, heads.ForCausalLM):
        return _Causal(model, tokenizer)
    if getattr(model, "label_axes", ()) and hasattr(tokenizer, "vocabulary_ids"):
        return _BothWays(model, tokenizer)
    if predicts_in_any_order(model):
        return _Permuted(model, tokenizer)
    raise CtxError(
        f"{type(model).__name__} is no language model that scores texts.",
        hint="open a checkpoint with AutoModelForCausalLM, AutoModelForMaskedLM or, of ELMo, AutoModelForPreTraining.",
    )
