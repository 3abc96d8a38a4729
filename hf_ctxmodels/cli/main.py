"""The console command: `hf-ctxmodels <command> ...`, or `python -m hf_ctxmodels <command> ...`."""

import argparse
import difflib
import sys
from importlib import import_module
from typing import NoReturn

from hf_ctxmodels.core.errors import CtxError, run_script

PROGRAM = "hf-ctxmodels"

# Command -> what it does. Its module in `hf_ctxmodels.cli` has its name, and is imported when it is run.
COMMANDS = {
    "pretrain": "Pretrain a model of any registered family on raw text.",
    "finetune": "Fine-tune a model on a task, and compare it with a baseline.",
    "distill": "Let a small student learn from a teacher, on raw text or on a task.",
    "augment": "Make more training examples for distillation, with other words.",
    "train-tokenizer": "Train the tokenizer of any family on documents.",
    "make-pairs": "Make sources and targets for a task of summaries or questions.",
    "find-units": "Find phrases and entities, for objectives that mask units.",
    "evaluate-words": "Test the word vectors of a model, or look words up.",
    "evaluate-sentences": "Test the sentence vectors of a model.",
    "evaluate-perplexity": "Measure the perplexity of a causal language model on a text.",
    "evaluate-pairs": "Test on minimal pairs whether a language model prefers the acceptable sentence.",
    "evaluate-forgetting": "Measure what fine-tuning forgot: the pretraining loss, and the distance of the weights.",
    "evaluate-transfer": "Train a tagger in one language, and test it in others.",
    "generate": "Write a text for each line of a file: translations, summaries, questions, continuations.",
    "ensemble": "Classify texts by several models together.",
    "quantize": "Write a model with weights of 8 bits, for inference on a CPU.",
    "export": "Export a model to ONNX or a program of torch.export.",
    "push": "Publish a trained model on the Hub.",
    "recipes": "List the recipes and the configurations for `accelerate launch`.",
    "demo": "Show what works in a few minutes, every number beside its baseline.",
}


def main() -> NoReturn:
    """Run the command that the command line names, and exit: 0, or the code of its error."""
    run_script(_run)


def _run() -> None:
    command, *rest = _parse(sys.argv[1:])
    # The name under which the command shows its usage, and a run's summary the command line.
    sys.argv = [f"{PROGRAM} {command}", *rest]
    import_module(f"hf_ctxmodels.cli.{command.replace('-', '_')}").main()


def _parse(argv: list[str]) -> list[str]:
    """The command and its own command line; help and version are printed here.

    Raises:
        CtxError: There is no such command.
    """
    lines = "\n".join(f"  {name:<20}{what}" for name, what in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} <command> [flags]",
        description=f"Contextual-embedding models: train, evaluate and publish them.\n\ncommands:\n{lines}",
        epilog=f"`{PROGRAM} <command> --help` explains the flags of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version())
    if not argv or argv[0].startswith("-"):
        parser.parse_args(argv or ["--help"])
    if not argv or argv[0] not in COMMANDS:
        near = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        raise CtxError(
            f"There is no command {argv[0]!r}.",
            location=f"{PROGRAM} {argv[0]}",
            hint=(f"did you mean {near[0]}? " if near else "") + f"`{PROGRAM} --help` lists the commands.",
        )
    return argv


def _version() -> str:
    from hf_ctxmodels import __version__

    return f"{PROGRAM} {__version__}"
