r"""Probe the layers of a model for linguistic properties, with controls.

    hf-ctxmodels analyze probe --model runs/bert --tasks pos deprel distance --train_file en_ewt-ud-train.conllu.gz \
        --dev_file en_ewt-ud-dev.conllu.gz --test_file en_ewt-ud-test.conllu.gz --output_dir analyses/bert
    hf-ctxmodels analyze probe --model bert-base-cased --tasks entities --train_file eng.train --dev_file eng.testa \
        --test_file eng.testb --probe edge --mix --name probe-entities --output_dir analyses/bert

Tasks from a CoNLL-U treebank: pos, xpos, morphology:NAME, arc, deprel; distance and depth (structural probe); the
sentence tasks sentlen, wc, bshift, tense, subjnum, objnum, coordinv, depdepth, which divide the sentences of all files
themselves. From CoNLL columns: tags, chunks, entities, coreference (the last two also from GUM), srl. From edge-probing
JSONL: spans. From a SentEval file, given as --train_file: senteval.

The output directory receives NAME.json, NAME.md and figures. An interrupted run continues with the same command.
"""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from hf_ctxmodels.analysis.output_arguments import OutputArguments
from hf_ctxmodels.analysis.probing.layer_scores import ProbingOptions, example_index
from hf_ctxmodels.analysis.probing.layer_tables import metric_of, probing_result
from hf_ctxmodels.analysis.probing.probes import PROBES, EdgeOptions
from hf_ctxmodels.analysis.probing.probing_run import TASK_NAMES, ProbingRun, build_data
from hf_ctxmodels.analysis.probing.training import ProbeTraining
from hf_ctxmodels.analysis.results import PartialResults
from hf_ctxmodels.architectures.word_encoder import WordPooling
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.devices import DeviceArguments
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, check_range, flag, parse_choices
from hf_ctxmodels.data.files import require_file
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import load_model_and_tokenizer

ESSENTIAL = ("model", "tasks", "train_file", "dev_file", "test_file", "output_dir")
Control = Literal["untrained", "control-task", "code-length", "none"]


@dataclass
class ProbeArguments(OutputArguments):
    """Model, tasks and probes."""

    model: str = flag(REQUIRED, "Directory or Hub id of a model, with its tokenizer.")
    tasks: list[str] = flag(REQUIRED, f"Tasks: {', '.join(TASK_NAMES)}.")
    train_file: str = flag(REQUIRED, "File of the training examples.")
    dev_file: str | None = flag(None, "File that selects the weights of a probe.")
    test_file: str | None = flag(None, "File for the scores.")
    layers: list[str] = flag(("all",), "Numbers of layers, 0 for the embeddings, or all.")
    probe: Any = flag("linear", "Probe.", choices=PROBES)
    mix: bool = flag(False, "Also train probes of learned layer mixes.")
    controls: list[str] = flag(
        (),
        "Controls: probes of a model with initial weights, probes of random labels of word types, and online code "
        "lengths (not of edge probes); or none. By default all that apply. Majority baselines are always shown.",
        choices=get_args(Control),
    )
    seeds: list[int] = flag((0, 1, 2), "Seeds of probes, control tasks and partitions of sentence tasks.")
    name: str = flag("probe", "Name of the result in the output directory: letters, digits, - and _.")
    pooling: WordPooling = flag("mean", "Tokens that represent a word: the mean of all, the first or the last one.")
    rank: int = flag(64, "Rank of the structural probe.")
    train_sample: int | None = flag(None, "Number of sentences of a treebank to train on, a fixed random sample.")
    vector_dtype: Literal["float16", "float32"] = flag("float16", "Data type of the stored vectors.")
    cache_dir: str | None = flag(
        None, "Directory for the word vectors, which later runs read; by default they are only in memory."
    )

    def __post_init__(self) -> None:
        parse_choices(self)
        check_range(self, "rank", "train_sample", at_least=1)
        if not re.fullmatch("[A-Za-z0-9_-]+", self.name):
            raise CtxError(f"{self.name!r} is not a name.", location="--name", hint="use letters, digits, - and _.")
        is_edge = isinstance(self.probe, EdgeOptions)
        if not self.controls:
            self.controls = ["untrained", "control-task", *([] if is_edge else ["code-length"])]
        if is_edge and "code-length" in self.controls:
            raise CtxError("Edge probes have no code length.", location="--controls", hint="remove code-length.")
        if "none" in self.controls and len(self.controls) > 1:
            raise CtxError("none cannot be combined.", location="--controls", hint="remove it, or the others.")
        for file in filter(None, (self.train_file, self.dev_file, self.test_file)):
            require_file(file)

    def layer_numbers(self) -> list[int] | None:
        """The layers; None for all."""
        if self.layers == ["all"]:
            return None
        try:
            return [int(layer) for layer in self.layers]
        except ValueError as error:
            raise CtxError(
                f"Layers are numbers, or all; not {' '.join(self.layers)}.", location="--layers", hint="use numbers."
            ) from error


def main() -> None:
    """Probe a model with trained and untrained weights; save tables and figures."""
    arguments, training, placement = parse_arguments(
        ProbeArguments, ProbeTraining, DeviceArguments, description=__doc__, essential=ESSENTIAL
    )
    arguments.check_output(arguments.name)
    sources = {"train": arguments.train_file, "dev": arguments.dev_file, "test": arguments.test_file}
    files = {split: file for split, file in sources.items() if file is not None}
    data = build_data(arguments.tasks, files, arguments.seeds, arguments.train_sample)
    options = ProbingOptions(
        arguments.probe,
        training,
        rank=arguments.rank,
        control_task="control-task" in arguments.controls,
        code_length="code-length" in arguments.controls,
    )
    model, tokenizer = load_model_and_tokenizer(arguments.model, "AutoModel")
    partial = PartialResults(Path(arguments.output_dir) / f"{arguments.name}-partial.json", "probe")
    run = ProbingRun(
        placement.place(model).eval(),
        tokenizer,
        data,
        options,
        layers=arguments.layer_numbers(),
        seeds=arguments.seeds,
        mix=arguments.mix,
        pooling=arguments.pooling,
        partial=partial,
        cache_dir=None if arguments.cache_dir is None else Path(arguments.cache_dir),
        dtype=getattr(torch, arguments.vector_dtype),
    )
    trained = run.results("trained")
    untrained = run.results("untrained") if "untrained" in arguments.controls else {}
    metrics = {
        name: metric_of(name, tasks[0].positive_label, isinstance(arguments.probe, EdgeOptions))
        for name, tasks in data.tasks.items()
    } | {name: metric_of(name, None, False) for name in data.structural}
    test_trees = data.trees["test"] if "distance" in data.structural else []
    example = example_index(len(sentence.words) for sentence in test_trees)
    result = probing_result(
        arguments.model,
        {**asdict(arguments), **asdict(training), "files": files, "examples": data.counts()},
        trained,
        untrained,
        run.baselines(),
        name=arguments.name,
        metrics=metrics,
        example=None if example is None else test_trees[example],
    )
    arguments.save(result, summary=f"{len(result.tables)} tables and {len(result.figures)} figures")
    partial.file.unlink(missing_ok=True)
