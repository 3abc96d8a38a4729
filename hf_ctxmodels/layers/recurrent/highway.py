"""LSTM with highway connections over packed sequences (He et al. 2017)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from hf_ctxmodels.layers.cpu.dropout import dropout
from hf_ctxmodels.layers.recurrent.packing import PackedSequences


class HighwayLSTM(nn.Module):
    """One layer of long short-term memory with a gated highway from its input to its output, in one direction (He et
    al. 2017, "Deep Semantic Role Labeling", equations 5 to 11; Zhang et al. 2016, arXiv 1510.08983).

        cell = sigmoid(forget) * cell + sigmoid(input) * tanh(candidate)
        h = sigmoid(highway) * sigmoid(output) * tanh(cell) + (1 - sigmoid(highway)) * W x

    The gates are linear in the input x and the previous h. In training h is dropped with one mask for all steps of a
    sequence, in the output and in the recurrence.

    Args:
        dropout: Dropout rate of h.
    """

    initializes_itself = True

    def __init__(self, input_size: int, hidden_size: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.hidden_size, self.dropout = hidden_size, dropout
        # input, forget, output and highway gate, candidate; of the input also the highway
        self.input_weight = nn.Parameter(torch.empty(6 * hidden_size, input_size))
        self.state_weight = nn.Parameter(torch.empty(5 * hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.empty(5 * hidden_size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Orthonormal matrices (section 4.1), and a forget bias of one."""
        for weight in (self.input_weight, self.state_weight):
            if not getattr(weight, "_is_hf_initialized", False):
                for matrix in weight.split(self.hidden_size):
                    nn.init.orthogonal_(matrix)
        if not getattr(self.bias, "_is_hf_initialized", False):
            init.zeros_(self.bias)
            init.ones_(self.bias[self.hidden_size : 2 * self.hidden_size])

    def forward(self, packed: Tensor, packing: PackedSequences) -> Tensor:
        """Run over all steps.

        Args:
            packed: (1, tokens, input) from `packing.pack`, of one direction.

        Returns:
            (1, tokens, hidden).
        """
        size = self.hidden_size
        gates = F.linear(packed[0], self.input_weight)
        inputs, highways = gates[:, : 5 * size] + self.bias, gates[:, 5 * size :]
        num_sequences = len(packing.order)
        hidden = cell = gates.new_zeros(num_sequences, size)
        mask = dropout(gates.new_ones(num_sequences, size), self.dropout, self.training)
        outputs = []
        for step_inputs, highway in zip(inputs.split(packing.steps), highways.split(packing.steps), strict=True):
            rows = len(step_inputs)
            step_gates = torch.addmm(step_inputs, hidden[:rows], self.state_weight.T.to(hidden.dtype))
            input_gate, forget, output, carry = step_gates[:, : 4 * size].sigmoid().chunk(4, 1)
            cell = forget * cell[:rows] + input_gate * step_gates[:, 4 * size :].tanh()
            hidden = highway + carry * (output * cell.tanh() - highway)
            if self.training and self.dropout:
                hidden = hidden * mask[:rows]
            outputs.append(hidden)
        return torch.cat(outputs)[None]
