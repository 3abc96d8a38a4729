"""Model cards: a template filled from a saved model and the summary of its training run, without local paths."""

import dataclasses
import json
import math
import re
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath, PureWindowsPath
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_NAME

from hf_ctxmodels.downstream.multitask import CtxMultiTaskConfig
from hf_ctxmodels.downstream.tasks import TASKS
from hf_ctxmodels.downstream.tasks.metrics import metric_range
from hf_ctxmodels.hub.specifications import get_spec
from hf_ctxmodels.registry import head_class
from hf_ctxmodels.spec import FamilySpec
from hf_ctxmodels.training.summary import SUMMARY_FILE, TrainingSummary
from hf_ctxmodels.training.training_log import plot_losses

CURVE_FILE = "training_curve.png"
_INSTALL_FROM_FILES = "pip install PATH_OR_URL  # of a wheel or a checkout of hf_ctxmodels"
_TABLE_ROWS = 10
_BASELINES = ("baseline_", "upper_bound_")  # prefixes of metrics that are not the model's

# Auto class -> pipeline tag on the Hub
_PIPELINES = {
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMultipleChoice": "multiple-choice",
}


def model_card(
    directory: Path, repo_id: str, summary: TrainingSummary | None = None, *, curve_image: str | None = None
) -> ModelCard:
    """Fill the card of a saved model.

    Args:
        repo_id: Repository of the card, "org/name".
        summary: Summary of the training run, without its absolute paths; by default the directory's, if any.
        curve_image: File name of the loss curve in the repository; None for a table of losses.
    """
    config = AutoConfig.from_pretrained(directory)
    family = get_spec(config)
    if summary is None and (directory / SUMMARY_FILE).exists():
        summary = TrainingSummary.load(directory)
    summary = published_summary(summary) if summary is not None else None
    model_class, auto_class = auto_class_of(family, config)
    head = head_class(auto_class, config)
    name = repo_id.split("/")[-1]
    num_elements = summary.parameters if summary else 0  # tied weights are saved once
    is_single_file = (directory / SAFE_WEIGHTS_NAME).exists()
    weight_files = directory.glob(SAFE_WEIGHTS_NAME if is_single_file else "model-*.safetensors")  # or its shards
    for path in [] if summary else weight_files:
        with safe_open(path, framework="pt") as weights:
            num_elements += sum(math.prod(weights.get_slice(key).get_shape()) for key in weights.keys())  # noqa: SIM118
    points = _losses(summary) if summary else []
    if len(points) > _TABLE_ROWS:  # evenly spaced, including the first and the last one
        points = [points[round(row * (len(points) - 1) / (_TABLE_ROWS - 1))] for row in range(_TABLE_ROWS)]
    installed = Path(__file__).with_name("template.md")
    source = Path(__file__).parents[2] / "model_cards" / "template.md"
    return ModelCard.from_template(
        _card_data(name, family, auto_class, summary),
        template_path=str(installed if installed.exists() else source),
        model_name=name,
        repo_id=repo_id,
        model_class=model_class,
        head_class=head.__name__,
        head_package=head.__module__.partition(".")[0],
        family_name=family.name,
        paper=family.paper,
        parameters=num_elements,
        max_length=getattr(config, "max_sequence_length", None),
        stub=f"{family.stub.module}.py",
        tasks=list(config.tasks or {}) if isinstance(config, CtxMultiTaskConfig) else [],
        summary=summary,
        results=results_table(summary) if summary else [],
        curve=points,
        curve_image=curve_image,
        install_command=install_command(),
        pairs=lambda values: ", ".join(f"{key} {value}" for key, value in values.items()),
        number=lambda value: f"{value:,}" if isinstance(value, int) else f"{value:.4g}",
    )


def results_table(summary: TrainingSummary) -> list[list[str]]:
    """The header and the rows of a table of the metrics, with their ranges, and of their baselines; empty without
    metrics."""
    metrics = summary.metrics
    task_kinds = dict(re.findall(r"(\S+) \(([\w-]+)\)", summary.task))  # of a multi-task model
    names = list(dict.fromkeys(name.removeprefix("eval_") for name in metrics if not name.startswith(_BASELINES)))
    patterns = {
        "model": "eval_{}",
        "baseline": "baseline_{}",
        "TF-IDF": "baseline_{}_tfidf",
        "upper bound": "upper_bound_{}",
    }
    titles = [title for title, pattern in patterns.items() if any(pattern.format(name) in metrics for name in names)]
    rows = []
    for name in names:
        task = max((task for task in task_kinds if name.startswith(f"{task}_")), key=len, default="")
        task_kind = task_kinds.get(task, summary.task)
        is_percentage = task_kind in TASKS and TASKS[task_kind].is_percentage
        values = [
            metrics.get(patterns[title].format(name), metrics.get(name) if title == "model" else None)
            for title in titles
        ]
        cells = ["" if value is None else f"{value:.4g}" for value in values]
        rows.append([name, *cells, metric_range(name, is_percentage)])
    return [["metric", *titles, "range"], *rows] if rows else []


def install_command() -> str:
    """The command that installs the package from where it was installed here (PEP 610): a package index, a git
    repository or a URL. For local files it is the repository in the package's metadata, else a placeholder."""
    try:
        package = distribution("hf_ctxmodels")
    except PackageNotFoundError:
        return _INSTALL_FROM_FILES
    source = json.loads(package.read_text("direct_url.json") or "null")
    if source is None:
        return f'pip install "hf_ctxmodels>={package.version}"'
    if "vcs_info" in source:
        return f"pip install {source['vcs_info']['vcs']}+{source['url']}@{source['vcs_info']['commit_id']}"
    if not source["url"].startswith("file:"):
        return f"pip install {source['url']}"
    urls = (entry.partition(", ") for entry in package.metadata.get_all("Project-URL") or [])
    return next((f"pip install git+{url}" for name, _, url in urls if name == "Repository"), _INSTALL_FROM_FILES)


def auto_class_of(family: FamilySpec, config: PreTrainedConfig) -> tuple[str, str]:
    """Names of the saved model's class and of the Auto class that opens it; AutoModel by default."""
    model_class = (config.architectures or [family.models["AutoModel"].__name__])[0]
    # A class may be registered with several Auto classes; the first one is its task.
    heads = (*family.models.items(), *family.alternative_heads.items())
    names = {model.__name__: auto_class for auto_class, model in reversed(heads)}
    return model_class, names.get(model_class, "AutoModel")


def loss_curve_png(summary: TrainingSummary) -> bytes | None:
    """PNG of the loss curve; None if matplotlib is not installed or no loss was logged."""
    if not _losses(summary):
        return None
    with TemporaryDirectory() as directory:
        file = Path(directory) / CURVE_FILE
        return file.read_bytes() if plot_losses(summary.curve, file, summary.baselines) else None


def _card_data(name: str, family: FamilySpec, auto_class: str, summary: TrainingSummary | None) -> ModelCardData:
    pipeline = _PIPELINES.get(auto_class)
    if auto_class == "AutoModelForPreTraining":  # the pipeline loads the language modeling head from it
        heads = [name for name in ("AutoModelForMaskedLM", "AutoModelForCausalLM") if name in family.models]
        pipeline = _PIPELINES[heads[0]] if heads else None
    data = ModelCardData(
        library_name="transformers",
        tags=sorted({"hf_ctxmodels", family.config.model_type, family.name}),
        pipeline_tag=pipeline or "feature-extraction",
        model_name=name,
    )
    if summary and summary.metrics:
        data.eval_results = [
            EvalResult(
                task_type=pipeline or "feature-extraction",
                dataset_type=summary.dataset,
                dataset_name=summary.dataset,
                metric_type=metric,
                metric_value=value,
            )
            for metric, value in summary.metrics.items()
            if not metric.startswith(_BASELINES)
        ]
    return data


def _losses(summary: TrainingSummary) -> list[tuple[int, float]]:
    return [(int(row["step"]), row["loss"]) for row in summary.curve if "loss" in row]


def without_local_paths(value: Any) -> Any:
    """Replace absolute paths in the strings of a JSON value, separated by ", " or "=", by their file names."""
    if isinstance(value, dict):
        return {name: without_local_paths(item) for name, item in value.items()}
    if isinstance(value, list):
        return [without_local_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    return ", ".join("=".join(map(_file_name, item.split("="))) for item in value.split(", "))


def published_summary(summary: TrainingSummary) -> TrainingSummary:
    """Summary of a training run without local paths."""
    try:
        words = shlex.split(summary.command)
    except ValueError:  # an unbalanced quotation mark
        words = summary.command.split()
    fields = without_local_paths({field.name: getattr(summary, field.name) for field in dataclasses.fields(summary)})
    return TrainingSummary(**{**fields, "command": shlex.join(map(without_local_paths, words))})


def _file_name(text: str) -> str:
    path = text.removeprefix("file://")
    if PureWindowsPath(path).drive:
        return PureWindowsPath(path).name or text
    is_local = path != text or path.startswith("~") or PurePosixPath(path).is_absolute()
    return (PurePosixPath(path).name if is_local else "") or text
