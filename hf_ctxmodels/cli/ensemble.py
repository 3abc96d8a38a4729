r"""Classify texts by the mean of the probabilities of several models, and print the metrics.

hf-ctxmodels ensemble --models runs/forward runs/backward --validation_file test.tsv --text_columns sentence
"""

from dataclasses import dataclass, field

from transformers import AutoModelForSequenceClassification

from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.downstream.loading_with_adapters import load_model_with_adapters
from hf_ctxmodels.downstream.tasks import SequenceClassification, TaskArguments
from hf_ctxmodels.inference import score_ensemble
from hf_ctxmodels.tokenizers.base import check_tokenizer_matches_model
from hf_ctxmodels.training.model_loading import load_config, load_tokenizer
from hf_ctxmodels.training.recipe import parse_arguments


@dataclass
class EnsembleArguments:
    """Models and data."""

    models: list[str] = field(metadata={"help": "Directories or Hub ids of text classifiers, of any families."})
    validation_file: str = field(metadata={"help": "Labelled examples, as --validation_file of finetune."})
    batch_size: int = flag(32, "Examples per batch.")


def main() -> None:
    """Evaluate the classifiers and their ensemble."""
    task_section = (TaskArguments, SequenceClassification.argument_names)
    arguments, task_arguments = parse_arguments(EnsembleArguments, task_section, description=__doc__)
    task = SequenceClassification(task_arguments)
    examples = task.read(arguments.validation_file, "validation")
    classifiers = []
    for source in arguments.models:
        config, tokenizer = load_config(source), load_tokenizer(source)
        check_tokenizer_matches_model(tokenizer, config, task_arguments.max_length, location=source)
        classifiers.append(
            (load_model_with_adapters(source, AutoModelForSequenceClassification.__name__, config), tokenizer)
        )
    scores = score_ensemble(classifiers, examples, task, arguments.batch_size)
    width = max(map(len, [*arguments.models, "ensemble"]))
    for name, metrics in zip([*arguments.models, "ensemble"], [*scores.members, scores.ensemble], strict=True):
        print(f"{name:<{width}}  " + "  ".join(f"{metric} {value:.4f}" for metric, value in metrics.items()))
    print(f"{len(examples)} examples")
