r"""Fine-tune a model on a task, and compare it with a baseline.

    python scripts/finetune.py --model runs/bert --task sequence-classification --train_file train.tsv \
        --validation_file dev.tsv --text_columns sentence --label_column label --output_dir runs/sst2

Runs as well under `accelerate launch`; --resume goes on where the last checkpoint was saved.
"""

import json
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import hf_ctxmodels  # noqa: F401 - registers the families
from hf_ctxmodels.data.tasks import TASKS, Task, TaskArguments
from hf_ctxmodels.errors import CtxError, run_script
from hf_ctxmodels.flags import flag
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.batches import EpochIndexed
from hf_ctxmodels.training.counted_loss import count_loss_targets
from hf_ctxmodels.training.loading import (
    check_fit,
    load_config,
    load_model,
    load_tokenizer,
    parse_config_options,
)
from hf_ctxmodels.training.loop import make_accelerator, train
from hf_ctxmodels.training.recipe import parse_arguments
from hf_ctxmodels.training.task_evaluation import TaskEvaluation


@dataclass
class FinetuneArguments:
    """What to fine-tune, on what."""

    model: str = field(metadata={"help": "Checkpoint directory or Hub id, with its tokenizer."})
    task: Literal[
        "sequence-classification", "regression", "token-classification", "question-answering", "multiple-choice"
    ] = field(metadata={"help": "What the model learns to do."})
    train_file: str = field(
        metadata={
            "help": "Training examples: .csv, .tsv, .txt (tab-separated) or .jsonl; CoNLL columns or .conllu for "
            "tagging; SQuAD .json for questions; each may end in .gz. Or `demo` for sequence-classification."
        }
    )
    validation_file: str = field(metadata={"help": "Held-out examples in the same form, or `demo`."})
    train_examples: int | None = flag(None, "Train on a sample of so many examples, the same one whatever the seed.")
    config_options: list[str] = flag((), "Fields of the configuration that differ from the model's, as key=value.")
    predictions_file: str | None = flag(None, "Write the final predictions for the validation file here, as .jsonl.")


@dataclass
class FinetuneLoopArguments(LoopArguments):
    """The loop's flags with the defaults of fine-tuning (Devlin et al. 2019, appendix A.3): 3 epochs at 5e-5."""

    learning_rate: float = field(default=5e-5, metadata={"help": "Peak learning rate."})
    warmup_steps: float = field(
        default=0.1, metadata={"help": "Steps of linear warm-up; a value below 1 is a share of all steps."}
    )

    def __post_init__(self) -> None:
        if self.max_steps is None and self.num_train_epochs is None:
            self.num_train_epochs = 3.0
        super().__post_init__()


def write_predictions(file: str, task: Task[Any], examples: list[Any], predictions: list[Any]) -> None:
    """One JSON object a line: the example, its label and what was predicted."""
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(task.record(*pair), ensure_ascii=False) for pair in zip(examples, predictions, strict=True)]
    Path(file).write_text("\n".join(lines) + "\n", encoding="utf-8")


def sample(examples: list[Any], size: int | None) -> list[Any]:
    """So many of the examples, drawn with a fixed seed; all of them for None.

    Raises:
        CtxError: there are not so many.
    """
    if size is None:
        return examples
    if not 0 < size <= len(examples):
        raise CtxError(
            f"There are {len(examples)} training examples.",
            where=f"--train_examples {size}",
            mend="give a number from 1 to that.",
        )
    return random.Random(0).sample(examples, size)


def table(metrics: dict[str, float], baseline: dict[str, float]) -> str:
    """The metrics beside what the baseline gets."""
    rows = [f"{'metric':<24}{'model':>10}{'baseline':>10}", f"{'loss':<24}{metrics['eval_loss']:>10.4f}{'':>10}"]
    rows += [f"{name:<24}{metrics[f'eval_{name}']:>10.4f}{value:>10.4f}" for name, value in baseline.items()]
    return "\n".join(rows)


def main() -> None:
    """Read, train, evaluate, save; print the metrics beside the baseline's."""
    arguments, task_arguments, loop_arguments = parse_arguments(
        FinetuneArguments, TaskArguments, FinetuneLoopArguments, description=__doc__
    )
    task = TASKS[arguments.task](task_arguments)
    training, validation = task.read(arguments.train_file, "train"), task.read(arguments.validation_file, "validation")
    training = sample(training, arguments.train_examples)
    config = load_config(arguments.model, changes=parse_config_options(arguments.config_options))
    tokenizer = load_tokenizer(arguments.model, split_words=task.split_words)
    check_fit(tokenizer, config, task_arguments.max_length, where=arguments.model)
    task.configure(config, training, validation)
    encoded, held_out = task.encode(training, tokenizer), task.encode(validation, tokenizer)
    baseline = task.score(validation, task.baseline(training, validation))

    accelerator = make_accelerator(loop_arguments)
    model = load_model(arguments.model, task.auto_class, config)
    count_loss_targets(model, task.targets)
    collate = task.collator(tokenizer)
    evaluation = TaskEvaluation(task, validation, held_out, collate, loop_arguments.per_device_batch_size)
    result = train(
        model,
        EpochIndexed(encoded.features),
        collate,
        loop_arguments,
        accelerator,
        tokenizer=tokenizer,
        evaluate=evaluation,
        identity={
            "task": arguments.task,
            "train_file": arguments.train_file,
            "train_examples": arguments.train_examples,
            "config_options": arguments.config_options,
            **asdict(task_arguments),
        },
    )

    if accelerator.is_main_process:
        main_metric = next(iter(baseline))
        result.metrics[f"baseline_{main_metric}"] = baseline[main_metric]
        summary = result.summary(
            task=arguments.task, dataset=Path(arguments.train_file).name, max_length=task_arguments.max_length
        )
        summary.save(loop_arguments.output_dir)
        if arguments.predictions_file:
            write_predictions(arguments.predictions_file, task, validation, evaluation.predictions)
        print(table(result.metrics, baseline))
        print(
            f"{len(training)} training and {len(validation)} validation examples; saved to {loop_arguments.output_dir}"
        )


if __name__ == "__main__":
    run_script(main)
