"""Log-probabilities of texts under causal, masked, permutation and bidirectional language models."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from hf_ctxmodels import heads
from hf_ctxmodels.architectures.continuations import ContinuationScore
from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.devices import to_float64
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_choice, check_range
from hf_ctxmodels.core.generation import max_input_length
from hf_ctxmodels.core.host_copies import CollatedBatch
from hf_ctxmodels.core.model import evaluation_mode
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import load_model_and_tokenizer
from hf_ctxmodels.evaluation.perplexity import is_permutation_lm
from hf_ctxmodels.registry import FAMILIES

_LANGUAGE_MODELS = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForPreTraining")

Sequences = list[dict[str, Any]]
"""Encoded sequences: the tokenizer's outputs; the `targets` of all tokens and, for a causal model, the index `start` of
the text's first token; or the `position` of a single target, and the `masked_positions` of further masks."""

PLLMetric = Literal["original", "within_word_l2r"]
"""What a pseudo-log-likelihood hides in addition to the predicted token: nothing, or the later tokens of its word."""


class TextScore(NamedTuple):
    """Sum of the log-probabilities of the predictions of a text, in nats, and number of predictions."""

    log_probability: float
    predictions: int


class TokenScore(NamedTuple):
    """Prediction of a token.

    Attributes:
        position: Index of the token among the tokenizer's tokens of the text, special tokens included.
        log_probability: In nats; the mean of both directions for ELMo.
        rank: Number of tokens of the vocabulary with a higher probability, plus 1.
        predictions: Ids of the most probable tokens, in descending order.
    """

    position: int
    log_probability: float
    rank: int
    predictions: list[int]


def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    batch_size: int = 32,
    pll_metric: PLLMetric = "original",
) -> list[TextScore]:
    """Score texts independently of each other; a higher score means a more probable text.

    - Causal language models: log-likelihood, each token given its left context (right context for a backward model).
      A prefix language model (`config.prefix_lm`) reads the token that begins the text as its prefix, the shortest one
      in training, so that each token has its left context; a text has no prompt whose tokens could attend to each
      other. `ContinuationScorer` scores a text after a prompt.
    - Masked language models and ELECTRA's generator: pseudo-log-likelihood (Salazar et al. 2020, arXiv 1910.14659),
      each token given all other tokens, one mask at a time.
    - XLNet: pseudo-log-likelihood without a mask token; each token is the only target of a factorization order in which
      all other tokens precede it.
    - ELMo: sum of the log-likelihoods of both directions.

    A pseudo-log-likelihood does not predict special tokens. A log-likelihood includes all predictions of training: the
    end-of-text token if the tokenizer adds one, and the first token after a start token (or the end of the previous
    text). Scores of different kinds of models or different vocabularies are not comparable.

    Args:
        model, tokenizer: A model with a language modeling head, and its tokenizer.
        batch_size: Sequences per batch; a pseudo-log-likelihood needs a sequence for every token.
        pll_metric: "within_word_l2r" (PLL-word-l2r of Kauf & Ivanova 2023, arXiv 2305.10588) also masks the later
            tokens of the same word. "original" overestimates words of several tokens, which reveal each other.

    Raises:
        CtxError: The model has no language modeling head, the metric is unknown or the model has no
            pseudo-log-likelihood, or a text has no token.
    """
    check_choice(get_args(PLLMetric), pll_metric=pll_metric)
    scorer = make_scorer(model, tokenizer)
    if isinstance(scorer, MaskedScorer):
        scorer.pll_metric = pll_metric
    elif pll_metric != "original":
        raise CtxError(
            f"{pll_metric} is a pseudo-log-likelihood; {type(model).__name__} computes log-likelihoods.",
            hint="use the default, or a masked language model.",
        )
    sequences: list[tuple[int, dict[str, Any]]] = []
    for index, text in enumerate(texts):
        text_sequences = list(scorer.encode(text))
        if not text_sequences:
            raise CtxError(f"Text {index} has no token: {text!r}.", hint="remove the text.")
        sequences.extend((index, sequence) for sequence in text_sequences)
    return _sum_scores(scorer, sequences, len(texts), batch_size)


def score_token_ids(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sequences: Sequence[Sequence[int]],
    *,
    batch_size: int = 32,
) -> list[TextScore]:
    """Log-likelihoods of sequences of token ids, each token but the first given the tokens before it; raises CtxError
    unless the model is a left-to-right language model."""
    scorer = make_scorer(model, tokenizer)
    if not isinstance(scorer, _CausalScorer) or scorer.is_backward:
        raise CtxError(
            f"{type(model).__name__} does not predict tokens from their left context.",
            hint="open a left-to-right language model with AutoModelForCausalLM.",
        )
    inputs = [
        {"input_ids": ids, "attention_mask": [1] * len(ids), "targets": ids, "start": 0} for ids in map(list, sequences)
    ]
    return _sum_scores(scorer, list(enumerate(inputs)), len(inputs), batch_size)


def _sum_scores(
    scorer: "_Scorer", sequences: list[tuple[int, dict[str, Any]]], num_texts: int, batch_size: int
) -> list[TextScore]:
    """The scores of texts, from the number of the text and the inputs of each sequence."""
    sequences = sorted(sequences, key=lambda item: len(item[1]["input_ids"]))
    log_probabilities, counts = [0.0] * num_texts, [0] * num_texts
    with evaluation_mode(scorer.model):
        for first in range(0, len(sequences), batch_size):
            indices, batch = zip(*sequences[first : first + batch_size], strict=True)
            predictions = scorer.predict(list(batch))
            sums = predictions.log_probabilities().sum(1).tolist()
            num_targets = (predictions.targets != IGNORE_INDEX).sum(1).tolist()
            for index, log_probability, count in zip(indices, sums, num_targets, strict=True):
                log_probabilities[index] += log_probability
                counts[index] += count
    return [TextScore(*values) for values in zip(log_probabilities, counts, strict=True)]


def score_pseudo_continuations(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    requests: Sequence[tuple[str, str]],
    *,
    max_length: int | None = None,
    batch_tokens: int = 2048,
) -> list[ContinuationScore]:
    """Pseudo-log-likelihoods of continuations of contexts: each token of the continuation given all other tokens of
    both, see `score`. Scores are in the order of the requests.

    Args:
        requests: Pairs of context and continuation.
        max_length: Maximum number of tokens; contexts are truncated at their beginning. None for the model's.
        batch_tokens: Maximum number of tokens of a batch, padding included; each token of a continuation needs a
            sequence. A longer sequence is a separate batch.

    Raises:
        CtxError: The model predicts no masked tokens, or a continuation has no token or too many.
    """
    scorer, limit = make_masked_scorer(model, tokenizer, max_length, batch_tokens)
    context_lengths = {context: len(list(scorer.encode(context))) for context in dict(requests)}
    sequences: list[tuple[int, dict[str, Any]]] = []
    are_truncated = []
    for index, (context, continuation) in enumerate(requests):
        text_sequences = list(scorer.encode(context + continuation))
        num_tokens = len(text_sequences) - context_lengths[context]
        encoded = _truncate_left(text_sequences, limit)
        if not 0 < num_tokens <= len(encoded):
            message = "has no token" if num_tokens <= 0 else "has too many tokens for the model"
            raise CtxError(f"The continuation {message}: {continuation!r}.", hint="use another continuation.")
        sequences += [(index, sequence) for sequence in encoded[-num_tokens:]]
        are_truncated.append(len(encoded) < len(text_sequences))
    log_probabilities, counts = [0.0] * len(requests), [0] * len(requests)
    are_greedy = [True] * len(requests)
    with evaluation_mode(scorer.model):
        for indices, batch in token_batches(sequences, batch_tokens):
            predictions = scorer.predict(batch)
            is_most_probable = predictions.logits.argmax(-1) == predictions.targets
            values = predictions.log_probabilities()[:, 0].tolist()
            for index, log_probability, is_greedy in zip(indices, values, is_most_probable[:, 0].tolist(), strict=True):
                log_probabilities[index] += log_probability
                counts[index] += 1
                are_greedy[index] &= is_greedy
    sizes = [len(continuation.encode()) for _, continuation in requests]
    columns = (log_probabilities, counts, sizes, are_greedy, are_truncated)
    return [ContinuationScore(*row) for row in zip(*columns, strict=True)]


def token_batches(
    sequences: Sequence[tuple[int, dict[str, Any]]], batch_tokens: int
) -> Iterator[tuple[list[int], Sequences]]:
    """Batches of sequences of similar length, the longest first, with their numbers: one sequence, or at most
    `batch_tokens` tokens with padding."""
    ordered = sorted(sequences, key=lambda item: -len(item[1]["input_ids"]))
    start = 0
    while start < len(ordered):
        size = max(1, batch_tokens // len(ordered[start][1]["input_ids"]))
        batch = ordered[start : start + size]
        yield [index for index, _ in batch], [sequence for _, sequence in batch]
        start += size


def _truncate_left(sequences: Sequences, limit: int | None) -> Sequences:
    """Sequences of one text with different positions, without the first tokens after the special ones at the beginning
    if there are more than `limit`; those whose position is removed are left out."""
    excess = 0 if limit is None or not sequences else len(sequences[0]["input_ids"]) - limit
    if excess <= 0:
        return sequences
    first = sequences[0]["position"]
    return [
        {
            name: value - excess if name == "position" else [*value[:first], *value[first + excess :]]
            for name, value in sequence.items()
        }
        for sequence in sequences
        if sequence["position"] >= first + excess
    ]


def score_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    batch_size: int = 32,
    num_predictions: int = 5,
) -> list[TokenScore]:
    """Score the tokens of a text that `score` predicts, in the order of the text.

    Args:
        model, tokenizer, batch_size: See `score`.
        num_predictions: Most probable tokens to return for each token.

    Raises:
        CtxError: The model has no language modeling head, or the text has no token.
    """
    scorer = make_scorer(model, tokenizer)
    sequences = list(scorer.encode(text))
    if not sequences:
        raise CtxError(f"The text has no token: {text!r}.", hint="use another text.")
    log_probabilities: dict[int, list[Tensor]] = {}
    targets: dict[int, int] = {}
    with evaluation_mode(model):
        for first in range(0, len(sequences), batch_size):
            batch = scorer.predict(sequences[first : first + batch_size])
            for row, column in (batch.targets != IGNORE_INDEX).nonzero().tolist():
                position = int(batch.positions[row, column])
                log_probabilities.setdefault(position, []).append(batch.logits[row, column].float().log_softmax(-1))
                targets[position] = int(batch.targets[row, column])
    scores = []
    for position, directions in sorted(log_probabilities.items()):
        values = torch.stack(directions).mean(0)
        target = values[targets[position]]
        predictions = values.topk(min(num_predictions, len(values))).indices.tolist()
        scores.append(TokenScore(position, target.item(), int((values > target).sum()) + 1, predictions))
    return scores


def input_length(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Number of tokens of the model's input for a text in `score`, with a start token that it adds; raises CtxError
    without a language modeling head."""
    return max((len(sequence["input_ids"]) for sequence in make_scorer(model, tokenizer).encode(text)), default=0)


def predict_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, positions: Sequence[int]
) -> list[Tensor]:
    """Predict the tokens at some positions of a text, independent of the tokens at these positions.

    The contexts are the same as in `score`. Masked and permutation language models see none of the text's mask tokens
    as content; the directions of ELMo are combined by the normalized geometric mean of their probabilities.

    Args:
        model, tokenizer: See `score`.
        positions: Indices among the tokenizer's tokens of the text, special tokens included.

    Returns:
        (vocabulary) log-probabilities in nats for each position, on the CPU.

    Raises:
        CtxError: The model has no language modeling head, or does not predict the token at a position, such as a
            special token of a masked language model.
    """
    scorer = make_scorer(model, tokenizer)
    log_probabilities: dict[int, list[Tensor]] = {position: [] for position in positions}
    with evaluation_mode(model):
        for sequence in scorer.encode(text):
            if "position" in sequence and sequence["position"] not in log_probabilities:
                continue
            batch = scorer.predict([sequence])
            for logits, position in zip(batch.logits[0], batch.positions[0].tolist(), strict=True):
                if position in log_probabilities:
                    log_probabilities[position].append(logits.float().log_softmax(-1).cpu())
    if missing := [position for position, directions in log_probabilities.items() if not directions]:
        raise CtxError(
            f"{type(model).__name__} does not predict the token at position {missing[0]} of {text!r}.",
            hint="use the positions of tokens that `score_tokens` scores.",
        )
    predictions = {
        position: torch.stack(directions).mean(0).log_softmax(-1) for position, directions in log_probabilities.items()
    }
    return [predictions[position] for position in positions]


def load_language_model(source: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Open the language model of a directory or Hub id, and its tokenizer.

    Raises:
        CtxError: As `language_model_class`, or the weights of the language modeling head are missing.
    """
    return load_model_and_tokenizer(source, language_model_class, require_head=True)


def language_model_class(config: PreTrainedConfig) -> str:
    """Name of the Auto class of a checkpoint's language model: the class that it was saved from, if it is known. Raises
    CtxError if the checkpoint, its family, or its model of transformers has no language model."""
    family = next((family for family in FAMILIES.values() if type(config) is family.config), None)
    if family is not None:
        names = {name: family.models[name].__name__ for name in _LANGUAGE_MODELS if name in family.models}
    else:
        # encoders have classes of both kinds
        mappings = {
            "AutoModelForMaskedLM": MODEL_FOR_MASKED_LM_MAPPING_NAMES,
            "AutoModelForCausalLM": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        }
        classes = {name: mapping.get(config.model_type) for name, mapping in mappings.items()}
        names = {name: class_name for name, class_name in classes.items() if class_name}
    if not names:
        raise CtxError(
            f"{(family.name if family else config.model_type)!r} has no language model.",
            location=config.name_or_path,
            hint="use a language model.",
        )
    saved_classes = {name.removeprefix("Ctx") for name in config.architectures or []}
    preferred = [name for name, class_name in names.items() if class_name.removeprefix("Ctx") in saved_classes]
    # transformers' ElectraForPreTraining is a discriminator
    is_pretrained = any(name.endswith("ForPreTraining") for name in saved_classes - {"ElectraForPreTraining"})
    if saved_classes and not preferred and not is_pretrained:
        raise CtxError(
            f"The checkpoint was saved from {', '.join(config.architectures or [])}, which is not a language model.",
            location=config.name_or_path,
            hint="use a language model.",
        )
    return (preferred or list(names))[0]


def saved_language_model_class(config: PreTrainedConfig) -> str | None:
    """As `language_model_class`; None for a checkpoint without a language model, or of unknown class."""
    try:
        return language_model_class(config) if config.architectures else None
    except CtxError:
        return None


LikelihoodKind = Literal["log-likelihood", "pseudo-log-likelihood"]


def likelihood_kind(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> LikelihoodKind:
    """The kind of the scores of a model, see `score`; raises CtxError without a language modeling head."""
    return make_scorer(model, tokenizer).kind


class _Predictions(NamedTuple):
    """(batch, predictions, vocabulary) logits, (batch, predictions) targets, -100 for none, and their positions."""

    logits: Tensor
    targets: Tensor
    positions: Tensor

    def log_probabilities(self) -> Tensor:
        """(batch, predictions) log-probabilities of the targets in float64, 0 for none."""
        logits, targets = self.logits.flatten(0, 1).float(), self.targets.flatten()
        losses = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="none")
        return to_float64(-losses.view_as(self.targets))


class _Scorer(ABC):
    """Scoring with one kind of language model."""

    kind: ClassVar[LikelihoodKind] = "log-likelihood"

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer

    @abstractmethod
    def encode(self, text: str) -> Iterable[dict[str, Any]]:
        """The sequences to compute for a text, see `Sequences`."""

    @abstractmethod
    def predict(self, sequences: Sequences) -> _Predictions:
        """The predictions of the sequences, and the positions of their targets in the tokens of the text."""

    def pad_inputs(self, sequences: Sequences) -> dict[str, Tensor]:
        """The tokenizer's outputs, padded to (batch, length)."""
        names = [name for name in self.tokenizer.model_input_names if name in sequences[0]]
        features = [{name: sequence[name] for name in names} for sequence in sequences]
        # GPT-2's tokenizer of transformers has no padding token, which one sequence does not need
        padded = self.tokenizer.pad(features, padding=len(features) > 1, return_tensors="pt")
        return CollatedBatch({name: padded[name] for name in names}).to(self.model.device)

    def pad_targets(self, sequences: Sequences, attention_mask: Tensor) -> Tensor:
        """(batch, length, ...) targets at the tokens of `attention_mask` (batch, length), -100 at padding."""
        values = torch.cat([torch.tensor(sequence["targets"]) for sequence in sequences]).to(attention_mask.device)
        targets = values.new_full((*attention_mask.shape, *values.shape[1:]), IGNORE_INDEX)
        targets[attention_mask != 0] = values
        return targets


class _CausalScorer(_Scorer):
    """Predicts every token from its left context."""

    def encode(self, text: str) -> Iterable[dict[str, Any]]:
        ids = list(self.tokenizer(text, verbose=False)["input_ids"])
        eos_id = self.tokenizer.eos_token_id
        start = 0
        if ids and ids[0] not in self.tokenizer.all_special_ids and eos_id is not None and not self.is_backward:
            ids, start = [eos_id, *ids], 1  # the separator between two texts in training
        sequence = {"input_ids": ids, "attention_mask": [1] * len(ids), "targets": ids, "start": start}
        return [sequence] if len(ids) > 1 else []

    @property
    def is_backward(self) -> bool:
        """Whether the model predicts tokens from their right context."""
        return getattr(self.model, "is_backward", False)

    def predict(self, sequences: Sequences) -> _Predictions:
        inputs = self.pad_inputs(sequences)
        attention_mask = inputs["attention_mask"]
        labels = self.pad_targets(sequences, attention_mask)
        targets = heads.next_token_targets(labels, labels.shape[1], attention_mask, None, self.is_backward)
        starts = torch.tensor([sequence["start"] for sequence in sequences], device=labels.device)[:, None]
        positions = attention_mask.cumsum(1) - 1 - starts + (-1 if self.is_backward else 1)
        return _Predictions(self.model(**inputs).logits, targets, positions)


class MaskedScorer(_Scorer):
    """Predicts every token from all other tokens, with a mask token at its position; see `PLLMetric`."""

    kind = "pseudo-log-likelihood"
    pll_metric: PLLMetric = "original"

    def encode(self, text: str) -> Iterable[dict[str, Any]]:
        """A sequence for each token that is not special, with its `position`."""
        encoded = self.tokenizer(text, return_special_tokens_mask=True, verbose=False)
        positions = [index for index, is_special in enumerate(encoded["special_tokens_mask"]) if not is_special]
        if self.pll_metric == "original":
            return [{**encoded, "position": position} for position in positions]
        words = encoded.word_ids()
        return [
            {
                **encoded,
                "position": position,
                "masked_positions": [
                    later for later in positions if later > position and words[later] == words[position]
                ],
            }
            for position in positions
        ]

    def predict(self, sequences: Sequences) -> _Predictions:
        """The prediction of the token at the `position` of each sequence."""
        inputs = self.pad_inputs(sequences)
        first_tokens = inputs["attention_mask"].int().argmax(1)
        positions = torch.tensor([sequence["position"] for sequence in sequences], device=first_tokens.device)[:, None]
        columns = first_tokens[:, None] + positions
        masked = [
            (row, later) for row, sequence in enumerate(sequences) for later in sequence.get("masked_positions", ())
        ]
        if masked:
            rows, later_positions = torch.tensor(masked, device=first_tokens.device).T
            inputs["input_ids"][rows, first_tokens[rows] + later_positions] = self.tokenizer.mask_token_id
        return _Predictions(self.target_logits(inputs, columns), inputs["input_ids"].gather(1, columns), positions)

    def target_logits(self, inputs: dict[str, Tensor], columns: Tensor) -> Tensor:
        """(batch, 1, vocabulary) logits of the tokens at (batch, 1) columns."""
        input_ids = inputs["input_ids"].scatter(1, columns, self.tokenizer.mask_token_id)
        if not hasattr(self.model, "mlm_head"):  # a model of transformers
            logits = self.model(**{**inputs, "input_ids": input_ids}).logits
            return logits.take_along_dim(columns[..., None], 1)
        output_mask = torch.zeros_like(input_ids, dtype=torch.bool).scatter(1, columns, True)
        states = self.model.encode(**{**inputs, "input_ids": input_ids}, output_mask=output_mask).last_hidden_state
        return self.model.mlm_head(states)[:, None]


class _PermutationScorer(MaskedScorer):
    """Predicts every token from all other tokens, as the last one in the factorization order."""

    def target_logits(self, inputs: dict[str, Tensor], columns: Tensor) -> Tensor:
        """(batch, 1, vocabulary) logits of the tokens at (batch, 1) columns."""
        is_hidden = inputs["input_ids"] == self.tokenizer.mask_token_id
        order = torch.full_like(inputs["input_ids"], -1).masked_fill(is_hidden, 0).scatter(1, columns, 0)
        return self.model(**inputs, permutation_order=order, target_positions=columns).logits


class _BidirectionalScorer(_Scorer):
    """Predicts every word from its left context and from its right context; the input consists of characters."""

    def encode(self, text: str) -> Iterable[dict[str, Any]]:
        tokenizer: Any = self.tokenizer
        [(word_ids, _)] = tokenizer.vocabulary_ids([text])
        if len(word_ids) <= tokenizer.num_special_tokens_to_add():
            return []
        padded = [IGNORE_INDEX, *word_ids.tolist(), IGNORE_INDEX]
        targets = list(zip(padded[2:], padded[:-2], strict=True))  # the next and the previous word
        return [{**tokenizer(text, verbose=False), "targets": targets}]

    def predict(self, sequences: Sequences) -> _Predictions:
        inputs = self.pad_inputs(sequences)
        targets = self.pad_targets(sequences, inputs["attention_mask"])
        positions = inputs["attention_mask"].cumsum(1) - 1
        target_positions = torch.stack([positions + 1, positions - 1], -1)
        return _Predictions(self.model(**inputs).logits.flatten(1, 2), targets.flatten(1), target_positions.flatten(1))


def make_scorer(model: Any, tokenizer: PreTrainedTokenizerBase) -> _Scorer:
    """The scorer for a kind of language model; raises CtxError without a language modeling head."""
    model = getattr(model, "generator", model)  # ELECTRA's pair
    if heads.is_masked_lm(model):
        return MaskedScorer(model, tokenizer)
    if isinstance(model, heads.ForCausalLM):
        return _CausalScorer(model, tokenizer)
    if getattr(model, "label_axes", ()) and hasattr(tokenizer, "vocabulary_ids"):
        return _BidirectionalScorer(model, tokenizer)
    if is_permutation_lm(model):
        return _PermutationScorer(model, tokenizer)
    if not model.config.is_encoder_decoder and not isinstance(model, heads.HeadModel):
        if type(model).__name__ in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values() and tokenizer.mask_token_id is not None:
            return MaskedScorer(model, tokenizer)
        if type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            return _CausalScorer(model, tokenizer)
    raise CtxError(
        f"{type(model).__name__} is not a language model that scores texts.",
        hint="use AutoModelForCausalLM, AutoModelForMaskedLM or, for ELMo, AutoModelForPreTraining.",
    )


def make_masked_scorer(
    model: Any, tokenizer: PreTrainedTokenizerBase, max_length: int | None, batch_tokens: int
) -> tuple[MaskedScorer, int | None]:
    """The scorer of a model that predicts masked tokens, and the maximum number of tokens of its input: `max_length`,
    or if it is None the model's limit. Raises CtxError for other models, or a number that is not positive."""
    check_range({"batch_tokens": batch_tokens, "max_length": max_length}, at_least=1)
    scorer = make_scorer(model, tokenizer)
    if not isinstance(scorer, MaskedScorer):
        raise CtxError(
            f"{type(model).__name__} predicts no masked tokens.",
            hint="use a masked language model or XLNet; for a causal model, use ContinuationScorer, or in task files "
            "`scoring: full`.",
        )
    return scorer, max_input_length(model.config) if max_length is None else max_length
