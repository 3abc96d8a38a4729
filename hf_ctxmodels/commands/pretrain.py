r"""Pretrain a model of any registered family on raw text.

    hf-ctxmodels pretrain --family bert --config tiny --tokenizer DIR --dataset demo --max_steps 500 \
        --per_device_batch_size 32 --max_length 128 --output_dir DIR

Runs as well under `accelerate launch`. After an interruption the same command with --resume goes on exactly where the
last checkpoint was saved.
"""

from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.pretraining import PretrainingArguments, pretrain
from hf_ctxmodels.training.recipe import parse_arguments


def main() -> None:
    """Parse the command line and pretrain."""
    pretrain(*parse_arguments(PretrainingArguments, LoopArguments, description=__doc__))
