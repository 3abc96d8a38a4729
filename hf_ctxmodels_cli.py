"""The console command: `hf-ctxmodels COMMAND ...`, or `python -m hf_ctxmodels COMMAND ...`.

This module is outside the package, whose import takes seconds: `--help` and `COMMAND --help` print at once. The help
texts of commands are stored in `hf_ctxmodels/cli/help`, which `scripts/write_help.py` writes.
"""

import atexit
import difflib
import gc
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

PROGRAM = "hf-ctxmodels"
HELP_FLAGS = ("-h", "--help")
HELP_FOLDER = Path(__file__).parent / "hf_ctxmodels" / "cli" / "help"


@dataclass(frozen=True)
class Command:
    """A command, a function of a module in `hf_ctxmodels.cli`, which is imported when the command runs."""

    summary: str
    module: str
    function: str = "main"
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class CommandGroup:
    """A command with subcommands; `placeholder` names the subcommand in usage lines."""

    summary: str
    subcommands: dict[str, Command]
    placeholder: str = "COMMAND"


FINETUNING_TASKS = {
    "sequence-classification": "Classify texts or pairs of texts.",
    "multi-label-classification": "Assign any number of labels to texts or pairs of texts.",
    "regression": "Predict a number for texts or pairs of texts.",
    "token-classification": "Tag the words of sentences.",
    "semantic-role-labeling": "Find the arguments of predicates.",
    "dependency-parsing": "Find the syntactic head and relation of each word.",
    "question-answering": "Find the answer to a question in a context.",
    "multiple-choice": "Choose among several continuations or answers.",
    "ranking": "Rank candidates for a query.",
    "seq2seq": "Generate a target text: translation, summary, question.",
    "coreference": "Find the spans of a text that mention the same entity.",
    "text2text": "Train one model on a mixture of tasks as text (T5).",
    "multitask": "Train one encoder on a list of tasks (MT-DNN).",
}
DISTILLATION_TASKS = ("sequence-classification", "regression", "token-classification")
CONVERSIONS = {  # name of the format -> summary, module and class in `hf_ctxmodels.conversion`
    "word-vectors": (
        "Word vectors: GloVe, word2vec and gensim files, in both directions.",
        "word_vector_files",
        "WordVectorConversion",
    ),
    "elmo": ("ELMo: options and HDF5 weights of AllenNLP.", "elmo", "ElmoConversion"),
    "cove": ("CoVe: weights of the MT-LSTM, and word vectors.", "cove", "CoveConversion"),
    "infersent": ("InferSent: weights, and word vectors.", "infersent", "InferSentConversion"),
    "laser": ("LASER: encoder, and BPE codes or SentencePiece model.", "laser", "LaserConversion"),
    "ulmfit": ("ULMFiT: weights and vocabulary of fastai.", "ulmfit", "UlmfitConversion"),
    "gpt": ("GPT: the folder of OpenAI's release.", "gpt", "GptConversion"),
    "transformer-xl": (
        "Transformer-XL: weights, configuration and vocabulary.",
        "transformer_xl",
        "TransformerXLConversion",
    ),
    "grover": ("Grover: TensorFlow checkpoint and vocabulary.", "grover", "GroverConversion"),
    "mass": ("MASS: checkpoints for translation or summaries.", "mass", "MassConversion"),
    "checkpoint": ("Sharded checkpoints of training.", "sharded_checkpoints", "CheckpointConversion"),
    "adapter": ("AdapterHub adapters with pickled weights.", "adapters", "AdapterConversion"),
}

GROUPS: dict[str, dict[str, Command | CommandGroup]] = {
    "first steps": {
        "demo": Command("Run the main features in a few minutes, with baselines.", "demo"),
        "recipes": Command("List recipes, task lists, behavioral tests and configurations of accelerate.", "recipes"),
    },
    "data": {
        "data": CommandGroup(
            "Train a tokenizer, and prepare data.",
            {
                "tokenizer": Command("Train the tokenizer of a family.", "train_tokenizer"),
                "prepare": Command("Tokenize a text once, for pretraining.", "prepare_corpus"),
                "pairs": Command("Make source-target pairs for seq2seq: summaries or questions.", "data", "pairs"),
                "units": Command("Collect phrases and entities for objectives that mask units.", "data", "units"),
                "phrases": Command("Join the words of phrases, for vectors of phrases.", "data", "phrases"),
                "clean": Command("Remove poor lines and duplicates from raw text.", "clean_text", "clean"),
                "overlap": Command("Find test examples in a training text.", "clean_text", "overlap"),
                "augment": Command("Augment the training examples of a task for distillation.", "data", "augment"),
            },
        ),
    },
    "training": {
        "pretrain": Command("Pretrain a model on raw text.", "pretrain"),
        "finetune": CommandGroup(
            "Fine-tune a model on a task.",
            {task: Command(summary, "finetune", arguments=(task,)) for task, summary in FINETUNING_TASKS.items()},
            "TASK",
        ),
        "distill": CommandGroup(
            "Train a student on the outputs of a teacher.",
            {
                "text": Command("Distill a masked language model on raw text.", "distill", arguments=("text",)),
                **{task: Command(FINETUNING_TASKS[task], "distill", arguments=(task,)) for task in DISTILLATION_TASKS},
            },
            "TASK",
        ),
    },
    "use and evaluation": {
        "predict": Command("Predict labels, tags, answers or scores for the examples of a file.", "predict"),
        "generate": Command("Generate a text for each line of a file.", "generate"),
        "embed": CommandGroup(
            "Embed words in context, or sentences.",
            {
                "words": Command("Embed the words of a file in context.", "embed_words"),
                "sentences": Command("Embed the sentences of a file.", "embed_sentences"),
            },
        ),
        "evaluate": CommandGroup(
            "Evaluate a model.",
            {
                "words": Command("Word similarity and analogies.", "evaluate", "words"),
                "sentences": Command(
                    "Sentence similarity, classification and translation retrieval.", "evaluate", "sentences"
                ),
                "pairs": Command("Minimal pairs of acceptable and unacceptable sentences.", "evaluate", "pairs"),
                "prompts": Command("Tasks as prompts, with examples in the context.", "evaluate_prompts"),
                "perplexity": Command("Perplexity of a causal language model.", "evaluate_perplexity"),
                "control": Command("Control codes: perplexity, attribution, generated texts.", "evaluate_control"),
                "mining": Command("Mining of translations in unaligned sentences.", "evaluate_mining"),
                "transfer": Command("Zero-shot transfer of a task between languages.", "transfer"),
                "pretraining": Command("Loss of the pretraining objective on a text.", "evaluate", "pretraining"),
                "forgetting": Command("Pretraining loss after fine-tuning.", "evaluate", "forgetting"),
                "ensemble": Command("Average of the predictions of several classifiers.", "evaluate", "ensemble"),
            },
        ),
        "analyze": CommandGroup(
            "Probing, attention, geometry and behavioral tests.",
            {
                "probe": Command("Probe the layers for linguistic properties, with controls.", "analyze_probe"),
                "attention": Command("Attention patterns and syntactic heads.", "analyze_attention"),
                "heads": Command("Which attention heads a model needs.", "analyze_heads"),
                "geometry": Command("Anisotropy and similarity of words by layer.", "analyze_geometry"),
                "senses": Command("Maps of the senses of a word, and disambiguation.", "analyze_senses"),
                "trees": Command("Dependency trees in the space of a structural probe.", "analyze_trees"),
                "alignment": Command("Alignment of the vectors of two languages.", "analyze_alignment"),
                "similarity": Command("Similarity of all layers of several models.", "analyze_similarity"),
                "landscape": Command("Loss landscapes, and the loss with one layer reset.", "analyze_landscape"),
                "triggers": Command(
                    "Universal triggers that change predictions, and their transfer.", "analyze_triggers"
                ),
                "behavior": Command("Behavioral tests: typos, negation, names, order.", "analyze_behavior"),
                "compare": Command("Compare two language models word by word.", "analyze_compare"),
                "report": Command("Write results of analyses as one HTML page.", "analyze_report"),
                "explore": Command("Explore one or two models in a browser.", "analyze_explore"),
            },
        ),
        "compare": Command("Compare families: equal text, budget and measures.", "compare"),
    },
    "file formats and publication": {
        "convert": CommandGroup(
            "Convert between the files of other libraries and models.",
            {name: Command(text, "convert", arguments=tuple(path)) for name, (text, *path) in CONVERSIONS.items()},
            "FORMAT",
        ),
        "export": CommandGroup(
            "Export or compress a model for inference.",
            {
                "onnx": Command("Export to ONNX.", "export", "graph", ("onnx",)),
                "openvino": Command("Export to OpenVINO.", "export", "graph", ("openvino",)),
                "torch": Command("Export to a program of torch.export.", "export", "graph", ("torch",)),
                "transformers": Command("Save in the layout of the class of transformers.", "export", "reference"),
                "int8": Command("Quantize the weights to 8 bits.", "export", "int8"),
                "low-rank": Command("Factorize the weights into smaller matrices.", "export", "low_rank"),
            },
            "FORMAT",
        ),
        "push": Command("Publish a model on the Hub.", "push"),
    },
}
COMMANDS: dict[str, Command | CommandGroup] = {
    name: command for commands in GROUPS.values() for name, command in commands.items()
}
FIRST_COMMANDS = ("demo", "pretrain", "finetune", "push")


def leaf_commands() -> dict[str, Command]:
    """Words of a command -> the command; subcommands for commands that have them."""
    leaves: dict[str, Command] = {}
    for name, command in COMMANDS.items():
        if isinstance(command, CommandGroup):
            leaves |= {f"{name} {subname}": subcommand for subname, subcommand in command.subcommands.items()}
        else:
            leaves[name] = command
    return leaves


def help_file(words: str) -> Path:
    """The file with the help text of a command."""
    return HELP_FOLDER / f"{words.replace(' ', '-')}.txt"


class UnknownCommandError(LookupError):
    """There is no such command or subcommand."""


def main() -> NoReturn:
    """Run the command of the command line and exit with 0 or the exit code of its error."""
    arguments = sys.argv[1:]
    _write_all_characters()
    if text := f"{PROGRAM} {version('hf_ctxmodels')}" if arguments[:1] == ["--version"] else help_text(arguments):
        try:
            print(text, flush=True)
        except BrokenPipeError:  # of `| head`; the output is flushed again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    try:
        find_command(arguments)
    except UnknownCommandError as error:
        print(f"\n{error}", file=sys.stderr)
        sys.exit(2)
    os.environ["MPLBACKEND"] = "agg"  # commands write files; the backend of a notebook may not be installed here
    atexit.register(gc.freeze)  # collections at exit would traverse the imported modules for seconds
    try:
        from hf_ctxmodels.core.console import run_script
    except KeyboardInterrupt:  # the import takes seconds
        print("\nInterrupted.", file=sys.stderr, flush=True)
        sys.exit(130)
    run_script(run)


def _write_all_characters() -> None:
    """Write files and pipes in UTF-8, which Windows does not do by default, and escape the characters that the encoding
    of a terminal, or of `PYTHONIOENCODING`, lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            is_default = stream.isatty() or "PYTHONIOENCODING" in os.environ
            stream.reconfigure(encoding=None if is_default else "utf-8", errors="backslashreplace")


def help_text(arguments: list[str]) -> str | None:
    """The help text that a command line requests; None if it runs a command."""
    name = arguments[0] if arguments else None
    group = COMMANDS.get(name or "")
    if name is None:
        lines = ["Contextual-embedding models: train, evaluate and publish them.\n"]
        lines += _summaries({name: COMMANDS[name] for name in FIRST_COMMANDS})
        lines += [f"\n`{PROGRAM} --help` lists all {len(COMMANDS)} commands, `{PROGRAM} COMMAND --help` explains one."]
    elif name in HELP_FLAGS:
        lines = [
            f"usage: {PROGRAM} COMMAND [flags]\n",
            "Contextual-embedding models: train, evaluate and publish them.",
        ]
        for title, commands in GROUPS.items():
            lines += [f"\n{title}:", *_summaries(commands)]
        lines += [f"\n`{PROGRAM} COMMAND --help` explains a command, `{PROGRAM} --version` prints the version."]
    elif isinstance(group, CommandGroup) and (len(arguments) == 1 or arguments[1] in HELP_FLAGS):
        usage = f"{PROGRAM} {name} {group.placeholder}"
        lines = [f"usage: {usage} [flags]\n", f"{group.summary}\n", *_summaries(group.subcommands)]
        lines += [f"\n`{usage} --help` lists flags."]
    else:
        return _stored_help(arguments)
    return "\n".join(lines)


def _stored_help(arguments: list[str]) -> str | None:
    """The help text of a command from its file, which is as the parser prints it; None for another command line, and if
    the package is imported, as in `python -m hf_ctxmodels`, so that its parser can print its help."""
    words = " ".join(arguments[:-1])
    if arguments[-1] not in HELP_FLAGS or words not in leaf_commands() or "hf_ctxmodels" in sys.modules:
        return None
    file = help_file(words)
    return file.read_text(encoding="utf-8").removesuffix("\n") if file.is_file() else None


def _summaries(commands: Mapping[str, Command | CommandGroup]) -> list[str]:
    lines = []
    for name, command in commands.items():
        usage = f"{name} {command.placeholder}" if isinstance(command, CommandGroup) else name
        lines.append(f"  {usage:<26}{command.summary}")
    return lines


def run() -> None:
    """Run the command of the command line."""
    words, command = find_command(sys.argv[1:])
    # for usage lines, and for the command line in the summary of a run
    sys.argv = [" ".join([PROGRAM, *words]), *sys.argv[1 + len(words) :]]
    getattr(import_module(f"hf_ctxmodels.cli.{command.module}"), command.function)(*command.arguments)


def find_command(arguments: list[str]) -> tuple[list[str], Command]:
    """The words that name a command, and the command; raises UnknownCommandError with a suggestion."""
    commands: Mapping[str, Command | CommandGroup] = COMMANDS
    for number, name in enumerate(arguments):
        command = commands.get(name)
        if isinstance(command, Command):
            return arguments[: number + 1], command
        if command is None:
            break
        commands = command.subcommands
    group = " ".join([PROGRAM, *arguments[:number]])
    names = {name: name for name in commands}
    if not number:
        groups = [(name, entry) for name, entry in COMMANDS.items() if isinstance(entry, CommandGroup)]
        names = {subname: f"{name} {subname}" for name, entry in groups for subname in entry.subcommands} | names
    similar = difflib.get_close_matches(name, names, n=1)
    suggestion = f"did you mean {names[similar[0]]}? " if similar else ""
    raise UnknownCommandError(
        f"Unknown command {name!r}.\n  where: {group} {name}\n  Fix: {suggestion}`{group} --help` lists the commands."
    )
