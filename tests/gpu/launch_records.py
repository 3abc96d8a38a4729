"""Count the kernels and views of a training step per layer on the simulated device, and print them as JSON.

Usage: PYTHONPATH=tests:tests/gpu python tests/gpu/launch_records.py FAMILY ...
"""

import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import simulated_device as gpu  # before torch
import torch
import transformers
from torch import Tensor, nn

import hf_ctxmodels
from hf_ctxmodels.compression.low_bits.modules import FakeQuantizedLinear
from hf_ctxmodels.layers.recurrent import lstm_steps, recurrence
from hf_ctxmodels.layers.recurrent.packing import PackedSequences
from hf_ctxmodels.layers.recurrent.rnn import LSTM
from hf_ctxmodels.training.optimizers import ScaledAdamW

torch.set_num_threads(1)
VOCAB_SIZE, LENGTH, HEAD_DIM = 50, 10, 64
LAYERS = 2, 3  # more than one, since the last layer computes fewer tokens
BATCH_SIZES = 8, 32
LSTM_STEPS = 4, 8
CONDITIONS = {"flash": ((9, 0), True), "float32": ((7, 5), False)}  # capability, autocast


class Architecture(NamedTuple):
    """Models of this package and of transformers, and the names of sizes in the configuration."""

    model: str
    reference: str
    sizes: dict[str, int]
    layers: tuple[str, ...] = ("num_hidden_layers",)


_ENCODER = {"hidden_size": 2 * HEAD_DIM, "num_attention_heads": 2, "intermediate_size": 256}
ARCHITECTURES = {
    "bert": Architecture("CtxBertForMaskedLM", "BertForMaskedLM", _ENCODER),
    "electra": Architecture(
        "CtxElectraForReplacedTokenDetection", "ElectraForPreTraining", _ENCODER | {"embedding_size": 2 * HEAD_DIM}
    ),
    "gpt2": Architecture(
        "CtxGpt2ForCausalLM", "GPT2LMHeadModel", {"n_embd": 2 * HEAD_DIM, "n_head": 2}, layers=("n_layer",)
    ),
    "t5": Architecture(
        "CtxT5ForConditionalGeneration",
        "T5ForConditionalGeneration",
        {"d_model": 2 * HEAD_DIM, "num_heads": 2, "d_kv": HEAD_DIM, "d_ff": 256, "decoder_start_token_id": 0},
        layers=("num_layers", "num_decoder_layers"),
    ),
    "xlnet": Architecture(
        "CtxXLNetForQuestionAnsweringSimple",
        "XLNetForQuestionAnsweringSimple",
        {"d_model": 2 * HEAD_DIM, "n_head": 2, "d_inner": 256},
        layers=("n_layer",),
    ),
}


def make_batch(family: str, batch_size: int) -> dict[str, Tensor]:
    """Sequences of different lengths, which leave padding, with labels."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (batch_size,), generator=generator)
    lengths[0] = LENGTH
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    ids = torch.randint(5, VOCAB_SIZE, mask.shape, generator=generator) * mask
    batch = {"input_ids": ids, "attention_mask": mask}
    if family == "xlnet":
        positions = torch.ones(batch_size, dtype=torch.long)
        return batch | {"start_positions": positions, "end_positions": positions + 2}
    if family == "electra":
        return batch | {"labels": ids % 2 * mask}
    return batch | {"labels": torch.where(mask == 1, ids, -100)}


def count_operations(family: str, library: Any, num_layers: int, batch_size: int, condition: str) -> gpu.Record:
    """Operations of a forward and a backward pass."""
    capability, autocast = CONDITIONS[condition]
    architecture = ARCHITECTURES[family]
    model_class = getattr(library, architecture.model if library is hf_ctxmodels else architecture.reference)
    sizes = architecture.sizes | dict.fromkeys(architecture.layers, num_layers)
    config = model_class.config_class(vocab_size=VOCAB_SIZE, **sizes)
    model, batch = model_class(config).train(), make_batch(family, batch_size)
    if family == "electra" and library is hf_ctxmodels:
        batch["labels"] = torch.where(batch["attention_mask"] == 1, batch["labels"], -100)
    with gpu.simulated_device(capability):
        gpu.to_device(model)
        device_batch = {name: tensor.to("cuda") for name, tensor in batch.items()}
        with gpu.recording() as record:
            with torch.autocast("cuda", torch.bfloat16) if autocast else contextlib.nullcontext():
                loss = model(**device_batch).loss
            loss.backward()
    return record


def count_per_layer(family: str, library: Any, batch_size: int, condition: str) -> dict[str, float]:
    """Launches and views per additional layer."""
    shallow, deep = (count_operations(family, library, layers, batch_size, condition) for layers in LAYERS)
    layers = LAYERS[1] - LAYERS[0]
    launches = (deep.launches.total() - shallow.launches.total()) / layers
    return {"launches": launches, "views": (deep.views - shallow.views) / layers}


def count_optimizer_launches(num_layers: int) -> int:
    """Launches of a step of `ScaledAdamW`."""
    weights = [torch.nn.Parameter(torch.randn(8, 8)) for _ in range(6 * num_layers)]
    weights += [torch.nn.Parameter(torch.randn(8)) for _ in range(2 * num_layers)]
    with gpu.simulated_device():
        model = gpu.to_device(torch.nn.ParameterList(weights))
        optimizer = ScaledAdamW(model.parameters(), lr=0.1, betas=(0.9, 0.99), eps=1e-8)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        with gpu.recording() as record:
            optimizer.step()
    return record.launches.total()


class SimulatedLSTMKernels:
    """`lstm_kernels`, which the simulated device cannot run, with one launch for each call of its functions."""

    @staticmethod
    def lstm_step(*arguments: Any) -> None:
        launch_once(lstm_steps.lstm_step, *arguments)

    class LSTMStepGradients(lstm_steps.LSTMStepGradients):
        def __call__(self, *arguments: Any) -> Tensor:
            return launch_once(super().__call__, *arguments)


def launch_once(function: Callable, *arguments: Any) -> Any:
    """Run a function, and record a single launch."""
    with gpu.recording():
        result = function(*arguments)
    gpu.record_launch(function.__name__)
    return result


def count_launches_per_lstm_step(steps: Any) -> float:
    """Launches per step of an LSTM layer with clipping, with `lstm_steps` or `lstm_kernels`."""
    with mock.patch.object(recurrence, "_select_lstm_steps", return_value=steps):
        short, long = (count_lstm_launches(num_steps) for num_steps in LSTM_STEPS)
    return (long - short) / (LSTM_STEPS[1] - LSTM_STEPS[0])


def count_lstm_launches(num_steps: int) -> int:
    """Launches of the forward and backward pass of an LSTM layer with clipping, which cuDNN does not have."""
    layer = LSTM(5, 6, projection_size=4, cell_clip=3.0, projection_clip=3.0)
    with gpu.simulated_device():
        gpu.to_device(layer)
        tokens = torch.ones(BATCH_SIZES[0], num_steps, dtype=torch.bool).to("cuda")
        packing = PackedSequences.build(tokens, directions=len(layer.bias))
        inputs = torch.randn(len(layer.bias), tokens.numel(), 5).to("cuda").requires_grad_()
        with gpu.recording() as record:
            layer(inputs, packing)[0].sum().backward()
    return record.launches.total()


def count_quantization_launches() -> int:
    """Launches of a linear layer with fake quantization of weight and input, beyond those of the layer without."""
    linear = nn.Linear(12, 16)
    launches = []
    for layer in (linear, FakeQuantizedLinear.from_module(linear, bits=4, groups=8)):
        with gpu.simulated_device():
            gpu.to_device(layer)
            inputs = torch.randn(BATCH_SIZES[0], 12).to("cuda").requires_grad_()
            with gpu.recording() as record:
                layer(inputs).sum().backward()
        launches.append(record.launches.total())
    return launches[1] - launches[0]


if __name__ == "__main__":
    for family in sys.argv[1:]:
        for condition in CONDITIONS:
            record: dict[str, Any] = {"family": family, "condition": condition}
            for batch_size in BATCH_SIZES:
                record[str(batch_size)] = count_per_layer(family, hf_ctxmodels, batch_size, condition)
            record["transformers"] = count_per_layer(family, transformers, BATCH_SIZES[0], condition)
            print(json.dumps(record), flush=True)
    counts = {
        "optimizer": [count_optimizer_launches(layers) for layers in LAYERS],
        "clipped_lstm_step": count_launches_per_lstm_step(lstm_steps),
        "clipped_lstm_step_by_triton": count_launches_per_lstm_step(SimulatedLSTMKernels),
        "fake_quantization": count_quantization_launches(),
    }
    print(json.dumps(counts))
