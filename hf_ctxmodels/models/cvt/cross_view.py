"""Auxiliary predictions from partial views, trained to agree with the full view (Clark et al. 2018, section 3)."""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from hf_ctxmodels.layers.cpu.linear import LinearLayers
from hf_ctxmodels.layers.pooling import Pooling, PoolingLayer

View = Callable[[Tensor, Tensor], Tensor]
"""Function of (batch, words, 2 * width) states of the bidirectional first layer and of (batch, words) sequence numbers,
0 at padding; returns the (batch, words, width) view."""


def forward_states(states: Tensor, sequences: Tensor) -> Tensor:
    """Forward states, which depend on a word and the words before it."""
    return states[..., : states.shape[-1] // 2]


def backward_states(states: Tensor, sequences: Tensor) -> Tensor:
    """Backward states, which depend on a word and the words after it."""
    return states[..., states.shape[-1] // 2 :]


def future_states(states: Tensor, sequences: Tensor) -> Tensor:
    """Forward states of the previous word, which depend on the words before a word; zeros for the first."""
    return _shift(forward_states(states, sequences), sequences, 1)


def past_states(states: Tensor, sequences: Tensor) -> Tensor:
    """Backward states of the next word, which depend on the words after a word; zeros for the last."""
    return _shift(backward_states(states, sequences), sequences, -1)


def _shift(states: Tensor, sequences: Tensor, offset: int) -> Tensor:
    """The state of each word's neighbor; zeros if it belongs to another sequence or is padding."""
    neighbors, neighbor_sequences = states.roll(offset, 1), sequences.roll(offset, 1)
    has_neighbor = (neighbor_sequences == sequences) & (sequences != 0)
    has_neighbor[:, 0 if offset > 0 else -1] = False
    return neighbors * has_neighbor[..., None].to(states.dtype)


WORD_VIEWS: dict[str, View] = {
    "forward": forward_states,
    "backward": backward_states,
    "future": future_states,
    "past": past_states,
}
"""Views of a word (section 4.1): one direction of the first layer, including or excluding the word itself."""

TEXT_VIEWS: dict[str, View] = {
    "forward": forward_states,
    "backward": backward_states,
    "beginning": forward_states,
    "end": backward_states,
}
"""Views of a text: one direction of the first layer, over all words or one half."""


class Predictor(LinearLayers):
    """Classifier with one hidden layer (section 4.1).

    Args:
        input_size, hidden_size, labels: Widths.
    """

    def __init__(self, input_size: int, hidden_size: int, labels: int) -> None:
        super().__init__(nn.Linear(input_size, hidden_size), nn.ReLU(), nn.Linear(hidden_size, labels))


class WordPredictors(nn.Module):
    """Primary prediction of each word, and auxiliary predictions from views.

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
        self.auxiliary = _build_auxiliary({name: Predictor(view_size, hidden_size, labels) for name in names})

    def forward(self, states: Tensor, tokens: Tensor) -> Tensor:
        """(batch, words, input) states -> (batch, words, labels) logits."""
        return self.primary(states)

    def get_views(self, states: Tensor, sequences: Tensor) -> dict[str, Tensor]:
        """(batch, words, labels) logits of each view; see `View` for the arguments."""
        return {name: predict(WORD_VIEWS[name](states, sequences)) for name, predict in _by_view(self.auxiliary)}


class TextPredictors(nn.Module):
    """Primary prediction of each text, and auxiliary predictions from views.

    The paper has no text classifier. Here, a view is one direction of the first layer, pooled over all words or over
    the half that this direction reads first.

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
        factor = 2 if pooling == "mean+max" else 1
        self.pooler = PoolingLayer(pooling)
        self.primary = Predictor(factor * input_size, hidden_size, labels)
        self.auxiliary = _build_auxiliary({name: Predictor(factor * view_size, hidden_size, labels) for name in names})

    def forward(self, states: Tensor, tokens: Tensor) -> Tensor:
        """(batch, words, input) states and (batch, words) bool tokens -> (batch, labels) logits."""
        return self.primary(self.pooler(states, tokens))

    def get_views(self, states: Tensor, sequences: Tensor) -> dict[str, Tensor]:
        """(batch, labels) logits of each view; see `View` for the arguments."""
        tokens = sequences != 0
        number, length = tokens.cumsum(1), tokens.sum(1, keepdim=True)
        halves = {"beginning": tokens & (2 * number <= length + 1), "end": tokens & (2 * number >= length + 1)}
        return {
            name: predict(self.pooler(TEXT_VIEWS[name](states, sequences), halves.get(name, tokens)))
            for name, predict in _by_view(self.auxiliary)
        }


def _build_auxiliary(predictors: dict[str, Predictor]) -> nn.ModuleDict:
    # with a suffix, since "forward" is not a valid name in a ModuleDict
    return nn.ModuleDict({f"{name}_view": predictor for name, predictor in predictors.items()})


def _by_view(predictors: nn.ModuleDict) -> Iterator[tuple[str, nn.Module]]:
    for name, predictor in predictors.items():
        yield name.removesuffix("_view"), predictor


def summed_consistency_loss(
    teacher: Tensor, students: dict[str, Tensor], problem_type: str = "single_label_classification"
) -> Tensor:
    """Kullback-Leibler divergence D(teacher || student) in nats, summed over predictions and students (section 3.1).

    The teacher gets no gradient.

    Args:
        teacher: (predictions, labels) logits.
        students: View name -> (predictions, labels) logits.
        problem_type: "single_label_classification"; "multi_label_classification", with one distribution per label; or
            "regression", with the squared distance.
    """
    teacher = teacher.detach().float()
    total = teacher.new_zeros(())
    for logits in students.values():
        logits = logits.float()
        if problem_type == "regression":
            total = total + F.mse_loss(logits, teacher, reduction="sum")
        elif problem_type == "multi_label_classification":
            probabilities = teacher.sigmoid()
            cross_entropy = F.binary_cross_entropy_with_logits(logits, probabilities, reduction="sum")
            entropy = F.binary_cross_entropy_with_logits(teacher, probabilities, reduction="sum")
            total = total + cross_entropy - entropy
        else:
            total = total + F.kl_div(F.log_softmax(logits, -1), F.softmax(teacher, -1), reduction="sum")
    return total
