"""Auxiliary predictions from partial views, trained to agree with the full view (Clark et al. 2018, section 3)."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_ctxmodels.layers.cpu.linear import LinearLayers
from hf_ctxmodels.layers.pooling import Pooling, PoolingLayer

View = Callable[[Tensor, Tensor], Tensor]
"""(batch, words, 2 * width) states of the bidirectional first layer and (batch, words) numbers of the sequences, 0 at
padding -> (batch, words, width) the view."""


def forward_states(states: Tensor, sequences: Tensor) -> Tensor:
    """Forward states: each word and those before it."""
    return states[..., : states.shape[-1] // 2]


def backward_states(states: Tensor, sequences: Tensor) -> Tensor:
    """Backward states: each word and those after it."""
    return states[..., states.shape[-1] // 2 :]


def future_states(states: Tensor, sequences: Tensor) -> Tensor:
    """Forward states of the previous word: the words before each word; zeros for the first."""
    return _shifted(forward_states(states, sequences), sequences, 1)


def past_states(states: Tensor, sequences: Tensor) -> Tensor:
    """Backward states of the next word: the words after each word; zeros for the last."""
    return _shifted(backward_states(states, sequences), sequences, -1)


def _shifted(states: Tensor, sequences: Tensor, by: int) -> Tensor:
    """Each word's neighbour; zeros if it belongs to another sequence or is padding."""
    neighbours, theirs = states.roll(by, 1), sequences.roll(by, 1)
    edge = 0 if by > 0 else -1
    same = (theirs == sequences) & (sequences != 0)
    same[:, edge] = False
    return neighbours * same[..., None].to(states.dtype)


WORD_VIEWS: dict[str, View] = {
    "forward": forward_states,
    "backward": backward_states,
    "future": future_states,
    "past": past_states,
}
"""Views of a word (section 4.1): one direction of the first layer, with or without the word itself."""

TEXT_VIEWS: dict[str, View] = {
    "forward": forward_states,
    "backward": backward_states,
    "beginning": forward_states,
    "end": backward_states,
}
"""Views of a text: one direction of the first layer, over all of its words or one half."""


class Predictor(LinearLayers):
    """States -> logits through one hidden layer (section 4.1).

    Args:
        input_size, hidden_size, labels: Widths.
    """

    def __init__(self, input_size: int, hidden_size: int, labels: int) -> None:
        super().__init__(nn.Linear(input_size, hidden_size), nn.ReLU(), nn.Linear(hidden_size, labels))


class WordPredictors(nn.Module):
    """The primary prediction for each word, and auxiliary predictions from views.

    Args:
        input_size: Width of the primary prediction's input.
        view_size: Width of a view.
        hidden_size: Width of the hidden layer.
        labels: Number of labels.
        views: Names of `WORD_VIEWS`; None for all.
    """

    def __init__(
        self, input_size: int, view_size: int, hidden_size: int, labels: int, views: Sequence[str] | None
    ) -> None:
        super().__init__()
        names = [name for name in WORD_VIEWS if views is None or name in views]
        self.primary = Predictor(input_size, hidden_size, labels)
        self.auxiliary = _named({name: Predictor(view_size, hidden_size, labels) for name in names})

    def forward(self, states: Tensor, tokens: Tensor) -> Tensor:
        """(batch, words, input) -> (batch, words, labels)."""
        return self.primary(states)

    def get_views(self, states: Tensor, sequences: Tensor) -> dict[str, Tensor]:
        """(batch, words, labels) of every auxiliary prediction; see `View` for the arguments."""
        return {name: predict(WORD_VIEWS[name](states, sequences)) for name, predict in _by_view(self.auxiliary)}


class TextPredictors(nn.Module):
    """The primary prediction for each text, and auxiliary predictions from views.

    The paper has no text classifier. Here a view is one direction of the first layer, pooled over all words or over the
    half that this direction reads first.

    Args:
        input_size, view_size, hidden_size, labels: See `WordPredictors`.
        views: Names of `TEXT_VIEWS`; None for all.
        pooling: Pooling of the words.
    """

    def __init__(
        self,
        input_size: int,
        view_size: int,
        hidden_size: int,
        labels: int,
        views: Sequence[str] | None,
        pooling: Pooling,
    ) -> None:
        super().__init__()
        names = [name for name in TEXT_VIEWS if views is None or name in views]
        wider = 2 if pooling == "mean+max" else 1
        self.pooler = PoolingLayer(pooling)
        self.primary = Predictor(wider * input_size, hidden_size, labels)
        self.auxiliary = _named({name: Predictor(wider * view_size, hidden_size, labels) for name in names})

    def forward(self, states: Tensor, tokens: Tensor) -> Tensor:
        """(batch, words, input) and (batch, words) bool -> (batch, labels)."""
        return self.primary(self.pooler(states, tokens))

    def get_views(self, states: Tensor, sequences: Tensor) -> dict[str, Tensor]:
        """(batch, labels) of every auxiliary prediction; see `View` for the arguments."""
        tokens = sequences != 0
        number, length = tokens.cumsum(1), tokens.sum(1, keepdim=True)
        halves = {"beginning": tokens & (2 * number <= length + 1), "end": tokens & (2 * number >= length + 1)}
        return {
            name: predict(self.pooler(TEXT_VIEWS[name](states, sequences), halves.get(name, tokens)))
            for name, predict in _by_view(self.auxiliary)
        }


def _named(predictors: dict[str, Predictor]) -> nn.ModuleDict:
    return nn.ModuleDict({f"{name}_view": predictor for name, predictor in predictors.items()})  # "forward" is taken


def _by_view(predictors: nn.ModuleDict) -> Iterator[tuple[str, nn.Module]]:
    for name, predictor in predictors.items():
        yield name.removesuffix("_view"), predictor


def summed_consistency_loss(
    teacher: Tensor, students: dict[str, Tensor], kind: str = "single_label_classification"
) -> Tensor:
    """The Kullback-Leibler divergence in nats of the students' distributions from the detached teacher's, summed over
    predictions and students (section 3.1, equation 2).

    Args:
        teacher: (n, labels) logits.
        students: Name -> (n, labels) logits.
        kind: "single_label_classification"; "multi_label_classification", with one distribution per label; or
            "regression", with the squared distance.
    """
    given, total = teacher.detach().float(), teacher.new_zeros((), dtype=torch.float32)
    for logits in students.values():
        logits = logits.float()
        if kind == "regression":
            total = total + F.mse_loss(logits, given, reduction="sum")
        elif kind == "multi_label_classification":
            soft = given.sigmoid()
            cross, own = (F.binary_cross_entropy_with_logits(each, soft, reduction="sum") for each in (logits, given))
            total = total + cross - own
        else:
            total = total + F.kl_div(F.log_softmax(logits, -1), F.softmax(given, -1), reduction="sum")
    return total
