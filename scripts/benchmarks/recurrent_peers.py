"""What peers in plain torch share: torch's own recurrent layers with our weights, and rows as long as sentences are."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from hf_ctxmodels.data.demo_corpus import demo_documents
from hf_ctxmodels.data.sentence_splitting import split_sentences
from hf_ctxmodels.layers.recurrent.gru import GRU
from hf_ctxmodels.layers.recurrent.recurrence import GRU_GATES, LSTM_GATES


@torch.no_grad()
def torch_layers(layers: Iterable[Any]) -> nn.RNNBase:
    """torch's layers with a copy of the weights of ours.

    Args:
        layers: `layers.recurrent.LSTM` or `layers.gru.GRU`, each reading the one before, all of one width.

    Returns:
        A `torch.nn.LSTM` or `torch.nn.GRU`, batch first; clipping and dropped weights are left out.
    """
    layers = list(layers)
    first = layers[0]
    kind, gates = (nn.GRU, GRU_GATES) if isinstance(first, GRU) else (nn.LSTM, LSTM_GATES)
    projection = getattr(first, "projection", None)
    directions, width, inputs = first.input_weight.shape
    sizes = {"proj_size": projection.shape[1]} if projection is not None else {}
    peer = kind(inputs, width // gates, len(layers), batch_first=True, bidirectional=directions == 2, **sizes)
    peer = peer.to(first.bias.device, first.bias.dtype)
    for depth, layer in enumerate(layers):
        parts = {"weight_ih": layer.input_weight, "weight_hh": layer.state_weight, "bias_ih": layer.bias}
        parts["bias_hh"] = torch.zeros_like(layer.bias) if layer.state_bias is None else layer.state_bias
        if projection is not None:
            parts["weight_hr"] = layer.projection
        for name, weights in parts.items():
            for weight, direction in zip(weights, ("", "_reverse"), strict=False):
                peer.get_parameter(f"{name}_l{depth}{direction}").copy_(weight)
    return peer


def demo_sentences() -> Iterator[str]:
    """The sentences of the demo text."""
    paragraphs = (paragraph for document in demo_documents() for paragraph in document)
    return (sentence for paragraph in paragraphs for sentence in split_sentences(paragraph))


def demo_lengths(rows: int, longest: int) -> Tensor:
    """(rows,) words of the demo text's first sentences, `longest` at most."""
    return torch.tensor([min(len(each.split()), longest) for each in islice(demo_sentences(), rows)])


def random_texts(lengths: Tensor, vocab_size: int) -> list[Tensor]:
    """For each of the lengths so many random ids, none of which is special."""
    return [torch.randint(vocab_size // 10, vocab_size, (length,)) for length in lengths.tolist()]


def pack(rows: Tensor, lengths: Tensor) -> nn.utils.rnn.PackedSequence:
    """(rows, length, width), padded on the right -> what torch's layers read, as long as each is."""
    return nn.utils.rnn.pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)


def unpack(packed: nn.utils.rnn.PackedSequence, padding: float = 0.0) -> Tensor:
    """What torch's layers gave -> (rows, length, width), `padding` after each row."""
    return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True, padding_value=padding)[0]
