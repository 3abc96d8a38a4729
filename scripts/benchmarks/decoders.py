"""Suite `decoders`: causal language models compared with transformers at the same weights."""

from functools import partial

from benchmarks import encoders
from benchmarks.cases import GENERATION_CASES, LANGUAGE_MODEL_CASES

run = partial(encoders.run, cases=[*LANGUAGE_MODEL_CASES, *GENERATION_CASES])
"""Run the cases of the suite; see `encoders.run` for the arguments."""
