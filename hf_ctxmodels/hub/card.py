"""Model cards: the template filled from a saved model and the record of its training run."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedConfig

from hf_ctxmodels.downstream.multitask import CtxMultiTaskConfig, get_spec
from hf_ctxmodels.hub.local_paths import published_summary
from hf_ctxmodels.hub.stub import stub_name
from hf_ctxmodels.spec import FamilySpec
from hf_ctxmodels.training.metrics.summary import SUMMARY_FILE, TrainingSummary
from hf_ctxmodels.training.metrics.training_log import plot_losses

CURVE_FILE = "training_curve.png"
_TABLE_ROWS = 10

# Auto class -> the pipeline the Hub offers for it.
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
    """The card of the model in `directory`.

    Args:
        directory: a saved model.
        repo_id: where the card will stand, "org/name".
        summary: how it was trained; by default what its `training_summary.json` says, if there is one. Absolute paths
            are left out of the card.
        curve_image: file name of the loss curve in the repository; without one the card has a table.

    Returns:
        A card that `ModelCard.validate` accepts.
    """
    config = AutoConfig.from_pretrained(directory)
    family = get_spec(config)
    if summary is None and (directory / SUMMARY_FILE).exists():
        summary = TrainingSummary.load(directory)
    summary = published_summary(summary) if summary is not None else None
    model_class, auto_class = auto_class_of(family, config)
    name = repo_id.split("/")[-1]
    return ModelCard.from_template(
        _card_data(name, family, auto_class, summary),
        template_path=str(_template_path()),
        model_name=name,
        repo_id=repo_id,
        model_class=model_class,
        auto_class=auto_class,
        family_name=family.name,
        paper=family.paper,
        parameters=summary.parameters if summary else _stored_elements(directory),
        max_length=getattr(config, "max_sequence_length", None),
        stub=f"{stub_name(family)}.py",
        tasks=list(config.tasks or {}) if isinstance(config, CtxMultiTaskConfig) else [],
        summary=summary,
        curve=_thinned(_losses(summary)) if summary else [],
        curve_image=curve_image,
        pairs=_pairs,
        number=_number,
    )


def auto_class_of(family: FamilySpec, config: PreTrainedConfig) -> tuple[str, str]:
    """The saved model's class and the Auto class that opens it; AutoModel opens every class."""
    model_class = (config.architectures or [family.models["AutoModel"].__name__])[0]
    # One class may stand for several Auto classes: the first is what it is for.
    names = {model.__name__: auto_class for auto_class, model in reversed(family.models.items())}
    return model_class, names.get(model_class, "AutoModel")


def loss_curve_png(summary: TrainingSummary) -> bytes | None:
    """The losses by step as a PNG, or None where matplotlib is not installed or nothing was logged."""
    if not _losses(summary):
        return None
    with TemporaryDirectory() as directory:
        file = Path(directory) / CURVE_FILE
        return file.read_bytes() if plot_losses(summary.curve, file, summary.baselines) else None


def _card_data(name: str, family: FamilySpec, auto_class: str, summary: TrainingSummary | None) -> ModelCardData:
    pipeline = _PIPELINES.get(auto_class)
    if auto_class == "AutoModelForPreTraining":  # which these heads open as well
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
        ]
    return data


def _template_path() -> Path:
    """The template: inside an installed package, else in the source tree."""
    installed = Path(__file__).with_name("template.md")
    return installed if installed.exists() else Path(__file__).parents[2] / "model_cards" / "template.md"


def _stored_elements(directory: Path) -> int:
    """Number of elements of all weights on disk, where a tied weight is stored once."""
    total = 0
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as weights:
            for key in weights.keys():  # noqa: SIM118 - not a mapping
                size = 1
                for extent in weights.get_slice(key).get_shape():
                    size *= extent
                total += size
    return total


def _losses(summary: TrainingSummary) -> list[tuple[int, float]]:
    return [(int(row["step"]), row["loss"]) for row in summary.curve if "loss" in row]


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most `_TABLE_ROWS` points, evenly spread, first and last among them."""
    if len(points) <= _TABLE_ROWS:
        return points
    return [points[round(row * (len(points) - 1) / (_TABLE_ROWS - 1))] for row in range(_TABLE_ROWS)]


def _pairs(values: Mapping[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
