"""Run commands on the simulated device, and print a JSON record of each: its exit code and its number of launches.

Usage: python command_runs.py [--no-float64] COMMAND... (each in quotes)
"""

import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import simulated_device as gpu  # before torch
import torch
from accelerate.state import AcceleratorState, GradientState
from commands import run_command

from hf_ctxmodels.training import training_state

torch.set_num_threads(1)
# tensors of the simulated device have neither pinned memory nor a storage that safetensors reads
torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
full_state_dict = training_state.full_state_dict
training_state.full_state_dict = lambda model: {name: value.cpu() for name, value in full_state_dict(model).items()}
has_float64 = sys.argv[1] != "--no-float64"
for command in sys.argv[1 if has_float64 else 2 :]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    errors = StringIO()
    with (
        gpu.simulated_device(float64=has_float64),
        gpu.recording() as operations,
        redirect_stdout(StringIO()),
        redirect_stderr(errors),
    ):
        try:
            code: object = run_command(*command.split())
        except Exception as error:
            code = f"{type(error).__name__}: {error}"
    record = {"command": command, "code": code, "launches": operations.launches.total()}
    print(json.dumps(record | {"stderr": errors.getvalue()[-2000:]}), flush=True)
