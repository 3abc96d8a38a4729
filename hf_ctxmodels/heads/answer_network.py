"""The stochastic answer network, a classifier of pairs that reasons in several steps (Liu et al. 2018, arXiv
1804.07888), as used by MT-DNN (Liu et al. 2019, arXiv 1901.11504, section 3, equations 3 and 4)."""

import torch
from torch import Tensor, nn

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import host_copy, on_host
from hf_ctxmodels.layers.cpu.dropout import Dropout
from hf_ctxmodels.layers.cpu.linear import linear
from hf_ctxmodels.layers.pooling import attention_pooling, build_token_mask, pair_features


class AnswerNetwork(nn.Module):
    """A classifier of text pairs on the token states of both texts.

        s_0 = sum_j softmax_j(w h_j) h_j                    over the states h of the second text
        x_k = sum_j softmax_j(s_k W p_j) p_j                over the states p of the first text
        P_k = softmax(V [s_k; x_k; |s_k - x_k|; s_k x_k])   for steps k = 0, ..., K - 1
        s_k+1 = GRU(x_k, s_k)

    The prediction is the mean of all P_k. In training it is the mean over the steps that stochastic prediction dropout
    keeps, at least one for each example. As in the released code, a step predicts before the state is updated.

    Args:
        dropout: Dropout rate of the state and of the features of the classifier.
        prediction_dropout: Probability of excluding a step from the mean.
    """

    def __init__(self, size: int, labels: int, steps: int, dropout: float, prediction_dropout: float) -> None:
        super().__init__()
        self.steps = steps
        self.prediction_dropout = prediction_dropout
        self.dropout = Dropout(dropout)
        self.start = nn.Linear(size, 1, bias=False)
        self.attention = nn.Linear(size, size, bias=False)
        if steps > 1:
            self.input_gates = nn.Linear(size, 3 * size)
            self.state_gates = nn.Linear(size, 3 * size)
        self.classifier = nn.Linear(4 * size, labels)

    def forward(self, states: Tensor, attention_mask: Tensor | None, token_type_ids: Tensor | None) -> Tensor:
        """Compute (batch, labels) log-probabilities from (batch, length, size) states.

        `token_type_ids` (batch, length) are 0 in the first text and above 0 in the second.
        """
        token_mask = build_token_mask(states, attention_mask)
        segments = on_host(torch.zeros_like, token_mask) if token_type_ids is None else token_type_ids
        first = on_host(lambda mask, ids: mask & (ids == 0), token_mask, segments)
        second = on_host(lambda mask, ids: mask & (ids != 0), token_mask, segments)
        is_checked = token_type_ids is None or not torch.compiler.is_compiling()
        if is_checked and not bool((host_copy(first).any(1) & host_copy(second).any(1)).all()):
            raise CtxError(
                "An answer network compares two texts, but an example has only one.",
                location="token_type_ids",
                hint="pass pairs, with token_type_ids 0 in the first and 1 in the second text; or set answer_steps=0.",
            )
        state = attention_pooling(linear(self.start, states).mT, states, second[:, None])[:, 0]
        context, predictions = None, []
        for _ in range(self.steps):
            if context is not None:
                state = self._gru(context, self.dropout(state))
            query = linear(self.attention, state)
            context = attention_pooling((states @ query[..., None]).mT, states, first[:, None])[:, 0]
            logits = linear(self.classifier, self.dropout(pair_features(state, context)))
            predictions.append(logits.float().log_softmax(-1))
        return self._average(torch.stack(predictions, 1))

    def _gru(self, context: Tensor, state: Tensor) -> Tensor:
        """The next state of the GRU, as in `torch.nn.GRUCell`."""
        reset_x, update_x, new_x = linear(self.input_gates, context).chunk(3, -1)
        reset_s, update_s, new_s = linear(self.state_gates, state).chunk(3, -1)
        update = (update_x + update_s).sigmoid()
        candidate = (new_x + (reset_x + reset_s).sigmoid() * new_s).tanh()
        return (1 - update) * candidate + update * state

    def _average(self, predictions: Tensor) -> Tensor:
        """(batch, steps, labels) log-probabilities -> (batch, labels), the log of the mean over the kept steps."""
        batch_size, steps, _ = predictions.shape
        mask = torch.ones(batch_size, steps, dtype=torch.bool, device=predictions.device)
        if self.training and self.prediction_dropout:
            mask = torch.rand(batch_size, steps, device=predictions.device) >= self.prediction_dropout
            mask = mask.scatter(1, torch.randint(steps, (batch_size, 1), device=predictions.device), True)
        predictions = predictions.masked_fill(~mask[..., None], -torch.inf)
        return predictions.logsumexp(1) - mask.sum(1, keepdim=True).log()
