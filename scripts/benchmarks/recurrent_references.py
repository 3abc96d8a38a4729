"""Recurrent layers of torch with the weights of this package, and batches of realistic sentence lengths."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from hf_ctxmodels.data.demo_corpus import demo_documents
from hf_ctxmodels.data.documents import split_sentences
from hf_ctxmodels.layers.recurrent.recurrence import GRU_GATES, LSTM_GATES
from hf_ctxmodels.layers.recurrent.rnn import GRU


@torch.no_grad()
def torch_layers(layers: Iterable[Any]) -> nn.RNNBase:
    """Copy the weights of recurrent layers into a module of torch.

    Args:
        layers: Stacked `layers.recurrent.LSTM` or `layers.recurrent.GRU` layers of equal width.

    Returns:
        A `torch.nn.LSTM` or `torch.nn.GRU` with `batch_first=True`, without clipping and weight dropout.
    """
    layers = list(layers)
    first = layers[0]
    layer_class, gates = (nn.GRU, GRU_GATES) if isinstance(first, GRU) else (nn.LSTM, LSTM_GATES)
    projection = getattr(first, "projection", None)
    directions, width, inputs = first.input_weight.shape
    sizes = {"proj_size": projection.shape[1]} if projection is not None else {}
    reference = layer_class(
        inputs, width // gates, len(layers), batch_first=True, bidirectional=directions == 2, **sizes
    )
    reference = reference.to(first.bias.device, first.bias.dtype)
    for depth, layer in enumerate(layers):
        parameters = {"weight_ih": layer.input_weight, "weight_hh": layer.state_weight, "bias_ih": layer.bias}
        parameters["bias_hh"] = torch.zeros_like(layer.bias) if layer.state_bias is None else layer.state_bias
        if projection is not None:
            parameters["weight_hr"] = layer.projection
        for name, weights in parameters.items():
            for weight, direction in zip(weights, ("", "_reverse"), strict=False):
                reference.get_parameter(f"{name}_l{depth}{direction}").copy_(weight)
    return reference


def demo_sentences() -> Iterator[str]:
    """Yield the sentences of the demo text."""
    paragraphs = (paragraph for document in demo_documents() for paragraph in document)
    return (sentence for paragraph in paragraphs for sentence in split_sentences(paragraph))


def demo_lengths(batch_size: int, max_length: int) -> Tensor:
    """(batch,) number of words of the first sentences of the demo text, at most `max_length`."""
    return torch.tensor([min(len(sentence.split()), max_length) for sentence in islice(demo_sentences(), batch_size)])


def random_sequences(lengths: Tensor, vocab_size: int) -> list[Tensor]:
    """Random sequences of the given lengths, without special tokens."""
    return [torch.randint(vocab_size // 10, vocab_size, (length,)) for length in lengths.tolist()]


def pack(inputs: Tensor, lengths: Tensor) -> nn.utils.rnn.PackedSequence:
    """Pack (batch, length, width) inputs, padded on the right."""
    return nn.utils.rnn.pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)


def unpack(packed: nn.utils.rnn.PackedSequence, padding: float = 0.0) -> Tensor:
    """Unpack to (batch, length, width), padded on the right with `padding`."""
    return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True, padding_value=padding)[0]
