"""Pretraining of all families: the held-out loss is lower than the loss of a frequency baseline."""

import json
import random
import re
from pathlib import Path

import pytest
import yaml
from benchmarks.learning_report import evaluate_pretraining, is_token_loss, learning_recipes
from training_runs import reset_accelerate

from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.data import load_documents
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import FamilySpec
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.pretraining import PretrainingArguments, pretrain
from hf_ctxmodels.training.summary import TrainingSummary

RECIPES = Path(__file__).resolve().parents[2] / "scripts" / "recipes"
HELD_OUT = 0.02
REVIEWS = "glue_like/movie_reviews/polarity2.jsonl.gz"
PRETRAINED = [family for family in FAMILIES.values() if family.objectives]
# Configuration fields of the small models; fields that a family does not have are omitted.
SMALL = {
    "hidden_size": 64,
    "cell_size": 64,
    "embedding_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "initializer_range": 0.1,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
# Of small models whose other fields are those of a recipe.
SMALL_SIZES = {name: value for name, value in SMALL.items() if name.endswith(("_size", "_layers"))}
# Recipe -> objective, for those of other data or longer sequences.
SHORT_OBJECTIVES = {
    "ernie_base_continual": "unit-mlm+pairs",
    "ernie_continual": "unit-mlm+pairs",
    "ulmfit_base": "clm:bptt=25",
    "xlm_base": "mlm",
    "xlm_learning": "mlm",
    "xlnet_base_512": "plm:memory_length=16,reuse_length=8,num_predictions=5",
    "xlnet_tiny_demo": "plm:memory_length=16,reuse_length=8",
}
# Recipes of new models; the others continue from a checkpoint.
NEW_MODEL_RECIPES = [
    path
    for path in sorted(RECIPES.glob("*.yaml"))
    if re.search(rf"pretrain --recipe {path.stem}\b(.|\n)*\nfamily: ", path.read_text(encoding="utf-8"))
    and path.stem != "ulmfit_learning_2"
]
MARGIN = 0.3  # nats below the frequency baseline, which a model cannot reach without the context
# Each line is a topic of four sentences; a word is predictable from its neighbors.
PROVERBS = """
a stitch in time saves nine. the early bird catches the worm. better late than never. a watched pot never boils.
a rolling stone gathers no moss. still waters run deep. make hay while the sun shines. rome was not built in one day.
too many cooks spoil the broth. two heads are better than one. practice makes a person perfect. haste makes waste.
actions speak louder than words. the pen is mightier than the sword. honesty is the best policy. silence is golden.
birds of a feather flock together. when the cat is away the mice will play. let sleeping dogs lie. time flies.
every cloud has a silver lining. where there is smoke there is fire. all that glitters is not gold. love is blind.
"""


def run_recipe(
    family: FamilySpec, recipe: Path, folder: Path, dataset: list[str] | tuple[str, ...], **overrides: object
) -> tuple[TrainingSummary, list[str]]:
    """Pretrain in this process with a recipe; return the summary and the command-line flags."""
    reset_accelerate()
    flags = {
        "recipe": recipe,
        "tokenizer": folder / "tokenizer",
        "validation_fraction": HELD_OUT,
        "dataloader_workers": 0,
        "output_dir": folder / recipe.stem,
        **overrides,
    }
    argv = data_flags(dataset)
    for name, value in flags.items():
        argv += [f"--{name}", *map(str, value if isinstance(value, tuple) else [value])]
    return pretrain(*parse_arguments(PretrainingArguments, LoopArguments, argv=argv)), argv


def data_flags(dataset: list[str] | tuple[str, ...]) -> list[str]:
    """Flags of a list of data sets, or of a tuple (file, file of translations, optionally their language tag)."""
    if isinstance(dataset, tuple):
        names = ("dataset", "translations", "language_tags")
        return [flag for name, value in zip(names, dataset) for flag in (f"--{name}", value)]
    return ["--dataset", *dataset]


@pytest.fixture(scope="session")
def documents() -> list[list[str]]:
    """300 documents of nine sentences, each one of the proverbs of the document's topic."""
    topics = [re.findall(r"[^.]+\.", line) for line in PROVERBS.strip().splitlines()]
    rng = random.Random(0)
    return [[sentence.strip() for sentence in rng.choices(topic, k=9)] for topic in rng.choices(topics, k=300)]


def write_text(family: FamilySpec, documents: list[list[str]], folder: Path) -> list[str] | tuple[str, ...]:
    """Write the documents; for translation, the first six words of each sentence and the same words reversed."""
    objective = next(iter(family.objectives.values()))
    text, translation = folder / "text.txt", folder / "reversed.txt"
    if not objective.requires_translations:
        text.write_text("\n\n".join("\n".join(document) for document in documents), encoding="utf-8")
        return [str(text)]
    sentences = [sentence.split()[:6] for document in documents for sentence in document]
    text.write_text("".join(" ".join(words) + "\n" for words in sentences), encoding="utf-8")
    translation.write_text("".join(" ".join(words[::-1]) + "\n" for words in sentences), encoding="utf-8")
    return (str(text), str(translation), *(["<backwards>"] if objective.requires_language_tags else []))


def train_tokenizer(
    family: FamilySpec, folder: Path, dataset: list[str] | tuple[str, ...], vocab_size: int, held_out: float = HELD_OUT
) -> None:
    if isinstance(dataset, tuple):
        source = load_documents(dataset[0], translations=dataset[1:2], language_tags=dataset[2:])
    else:
        source = load_documents(*dataset)
    training, _ = source.split(held_out)
    family.tokenizer.train(training.texts(), vocab_size=vocab_size).save_pretrained(folder / "tokenizer")


def pretrain_small(family: FamilySpec, documents: list[list[str]], folder: Path, seed: int = 0) -> TrainingSummary:
    """Pretrain a small model for a few steps with the family's recipe and the options of its traits."""
    short_training = family.traits.short_training
    config_options = [f"{name}={value}" for name, value in SMALL.items() if name in family.config.__dataclass_fields__]
    text = write_text(family, documents, folder)
    train_tokenizer(family, folder, text, short_training.vocab_size, held_out=0.08)
    overrides: dict[str, object] = {
        "objective": next(iter(family.objectives)),  # the objective of a recipe may require other data
        "validation_fraction": 0.08,
        "config_options": (*config_options, *short_training.config_options),
        "max_length": 32,
        "per_device_batch_size": 16,
        "max_steps": short_training.steps,
        "learning_rate": short_training.learning_rate,
        "lr_scheduler": "constant",
        "lr_reference_targets": 0,
        "seed": seed,
    }
    summary, _ = run_recipe(family, learning_recipes(RECIPES, family.name)[0], folder, text, **overrides)
    return summary


@pytest.mark.fast_families("bert", "glove")
@pytest.mark.parametrize("family", PRETRAINED, ids=lambda family: family.name)
def test_pretraining_beats_frequency_baseline(family: FamilySpec, documents: list[list[str]], tmp_path) -> None:
    summary = pretrain_small(family, documents, tmp_path)
    if not next(iter(family.objectives.values())).has_heldout_loss:
        losses = [record["loss"] for record in summary.curve if "loss" in record]
        assert losses[-1] < 0.5 * losses[0], f"the loss fell from {losses[0]:.3f} to {losses[-1]:.3f} only"
        return
    token_losses = [name for name in summary.baselines if is_token_loss(name, summary.metrics)]
    assert token_losses
    for name in token_losses:
        loss, baseline = summary.metrics[f"eval_{name}"], summary.baselines[name]
        assert loss < baseline - MARGIN, f"{name} {loss:.3f}, the frequency baseline is {baseline:.3f}"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", NEW_MODEL_RECIPES, ids=lambda path: path.stem)
def test_first_steps_of_recipe_do_not_diverge(recipe: Path, documents: list[list[str]], tmp_path) -> None:
    """With the recipe's optimizer, learning rate, clipping and configuration, the loss of a small model does not rise
    in its first steps."""
    settings = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    family = FAMILIES[settings["family"]]
    options = {**settings.get("config_options", {}), **SMALL_SIZES, "num_attention_heads": 2}
    options = {name: value for name, value in options.items() if name in family.config.__dataclass_fields__}
    options.pop("cutoffs", None)  # of a larger vocabulary
    text = write_text(family, documents, tmp_path)
    train_tokenizer(family, tmp_path, text, family.traits.short_training.vocab_size, held_out=0.08)
    overrides: dict[str, object] = {
        "config": "tiny",
        "config_options": tuple(f"{name}={json.dumps(value)}" for name, value in options.items()),
        "validation_fraction": 0.08,
        "max_length": 32,
        "per_device_batch_size": 16,
        "gradient_accumulation_steps": 1,
        "max_steps": 20,
        "dtype": "float32",
        "logging_steps": 5,
        "save_steps": 0,
        "seed": 0,
    }
    if recipe.stem in SHORT_OBJECTIVES:
        overrides["objective"] = SHORT_OBJECTIVES[recipe.stem]
    small_values = {"eval_steps": 10, "lr_reference_targets": 16 * 32, "news_articles": "false", "streaming": "false"}
    overrides |= {flag: value for flag, value in small_values.items() if settings.get(flag)}
    if settings.get("warmup_steps"):
        overrides["warmup_steps"] = 2
    if settings.get("sampling_alpha"):
        text = [*text, *text]
    summary, _ = run_recipe(family, recipe, tmp_path, text, **overrides)
    losses = [record["loss"] for record in summary.curve if "loss" in record]
    assert max(losses) < 1.02 * losses[0], losses


@pytest.mark.slow
@pytest.mark.parametrize("family", PRETRAINED, ids=lambda family: family.name)
def test_recipe_meets_learning_targets(family: FamilySpec, shared_data: Path, tmp_path) -> None:
    """Run the full recipe (up to three hours); all pretraining targets of scripts/learning.py are met."""
    if next(iter(family.objectives.values())).requires_translations:
        pytest.skip(f"{family.name} is evaluated by BLEU; see its model card")
    if not next(iter(family.objectives.values())).has_heldout_loss or hasattr(
        family.models["AutoModelForPreTraining"], "loss_by_scores"
    ):
        pytest.skip(f"{family.name} has no held-out token loss, which the targets refer to")
    text = [str(shared_data / "corpus" / family.traits.short_training.text), str(shared_data / REVIEWS)]
    train_tokenizer(family, tmp_path, text, 8000)
    initial_model = {}
    for recipe in learning_recipes(RECIPES, family.name):
        _, flags = run_recipe(family, recipe, tmp_path, text, **initial_model)
        initial_model = {"model": tmp_path / recipe.stem}
    criteria = evaluate_pretraining(tmp_path / recipe.stem, flags)
    assert any(criterion.target for criterion in criteria)
    assert [criterion for criterion in criteria if not criterion.is_met] == []
