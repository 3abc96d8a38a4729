"""The stochastic answer network: a classifier of pairs that reasons in several steps (Liu et al. 2018, arXiv
1804.07888; as in MT-DNN, Liu et al. 2019, arXiv 1901.11504, section 3, equations 6 to 9)."""

from typing import Any

import torch
from torch import Tensor, nn

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.cpu.linear import linear
from hf_ctxmodels.layers.pooling import pair_features, token_mask


class AnswerNetwork(nn.Module):
    """Classes of a pair from the states of its tokens; the second text asks, the first one is read.

        s_0 = sum_j softmax_j(w h_j) h_j                    over the second text's states h
        x_k = sum_j softmax_j(s_k W p_j) p_j                over the first text's states p
        P_k = softmax(V [s_k; x_k; |s_k - x_k|; s_k x_k])   for steps k = 0, ..., K - 1
        s_k+1 = GRU(x_k, s_k)

    The prediction is the mean of all P_k; in training it is the mean over the steps that stochastic prediction dropout
    leaves, at least one for each row. As in the released code, a step predicts before the state is updated.

    Args:
        size: Width of the states.
        labels: Number of classes.
        steps: K.
        dropout: Rate on the state and on the features of the classifier.
        prediction_dropout: Rate at which steps are left out of the mean.
    """

    def __init__(self, size: int, labels: int, steps: int, dropout: float, prediction_dropout: float) -> None:
        super().__init__()
        self.steps, self.prediction_dropout = steps, prediction_dropout
        self.dropout = Dropout(dropout)
        self.start = nn.Linear(size, 1, bias=False)
        self.attention = nn.Linear(size, size, bias=False)
        if steps > 1:
            self.input_gates = nn.Linear(size, 3 * size)
            self.state_gates = nn.Linear(size, 3 * size)
        self.classifier = nn.Linear(4 * size, labels)

    @classmethod
    def of(cls, config: Any) -> "AnswerNetwork":
        """The network that a configuration asks for; raises CtxError if it does not choose one of several classes."""
        if config.num_labels < 2 or config.problem_type not in (None, "single_label_classification"):
            raise CtxError(
                f"An answer network chooses one of several classes, not num_labels={config.num_labels} with "
                f"problem_type={config.problem_type!r}.",
                location=f"answer_steps={config.answer_steps}",
                hint="use answer_steps=0 for other tasks.",
            )
        rates = (config.head_dropout, config.answer_dropout)
        return cls(config.head_input_size, config.num_labels, config.answer_steps, *rates)

    def forward(self, states: Tensor, attention_mask: Tensor | None, token_type_ids: Tensor | None) -> Tensor:
        """(rows, labels) logarithms of the predicted probabilities.

        Args:
            states: (rows, length, size).
            attention_mask: (rows, length), 0 at padding.
            token_type_ids: (rows, length), 0 in the first text and above in the second.

        Raises:
            CtxError: A row is no pair.
        """
        first, second = _texts(states, attention_mask, token_type_ids)
        state = _weighted(linear(self.start, states)[..., 0], states, second)
        read, predictions = None, []
        for _ in range(self.steps):
            if read is not None:  # of the step before
                state = self._updated(read, self.dropout(state))
            asked = linear(self.attention, state)
            read = _weighted((states @ asked[..., None])[..., 0], states, first)
            scores = linear(self.classifier, self.dropout(pair_features(state, read)))
            predictions.append(scores.float().log_softmax(-1))
        return self._averaged(torch.stack(predictions, 1))

    def _updated(self, read: Tensor, state: Tensor) -> Tensor:
        """The GRU's next state, as in `torch.nn.GRUCell`."""
        reset_x, update_x, new_x = linear(self.input_gates, read).chunk(3, -1)
        reset_s, update_s, new_s = linear(self.state_gates, state).chunk(3, -1)
        update = (update_x + update_s).sigmoid()
        candidate = (new_x + (reset_x + reset_s).sigmoid() * new_s).tanh()
        return (1 - update) * candidate + update * state

    def _averaged(self, predictions: Tensor) -> Tensor:
        """(rows, steps, labels) logarithms of probabilities -> that of their mean over the kept steps."""
        rows, steps, _ = predictions.shape
        kept = torch.ones(rows, steps, dtype=torch.bool, device=predictions.device)
        if self.training and self.prediction_dropout:
            kept = torch.rand(rows, steps, device=predictions.device) >= self.prediction_dropout
            kept = kept.scatter(1, torch.randint(steps, (rows, 1), device=predictions.device), True)
        predictions = predictions.masked_fill(~kept[..., None], -torch.inf)
        return predictions.logsumexp(1) - kept.sum(1, keepdim=True).log()


def _texts(states: Tensor, attention_mask: Tensor | None, types: Tensor | None) -> tuple[Tensor, Tensor]:
    """Two (rows, length) masks: the tokens of the first and of the second text."""
    tokens = token_mask(states, attention_mask)
    if types is not None:
        first, second = tokens & (types == 0), tokens & (types != 0)
        if torch.compiler.is_compiling() or bool((first.any(1) & second.any(1)).all()):
            return first, second
    raise CtxError(
        "An answer network compares two texts, and a row has one only.",
        location="token_type_ids",
        hint="give pairs, with token_type_ids 0 in the first and 1 in the second text; or use answer_steps=0.",
    )


def _weighted(scores: Tensor, states: Tensor, there: Tensor) -> Tensor:
    """(rows, length) scores -> (rows, size) mean of the states that are there, weighted by the scores' softmax."""
    weights = scores.float().masked_fill(~there, -torch.inf).softmax(-1).to(states.dtype)
    return (weights[:, None] @ states)[:, 0]
