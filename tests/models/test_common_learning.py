"""Every family, by its own objective, learns from real text: what it predicts of unseen text beats a stated guess."""

from itertools import islice
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState
from benchmarks.learning_report import evaluate_pretraining, is_token_loss, learning_recipes

from hf_ctxmodels.data import load_documents
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import FamilySpec
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.metrics.summary import TrainingSummary
from hf_ctxmodels.training.pretraining import PretrainingArguments, pretrain
from hf_ctxmodels.training.recipe import parse_arguments

RECIPES = Path(__file__).resolve().parents[2] / "scripts" / "recipes"
HELD_OUT = 0.02
REVIEWS = "glue_like/movie_reviews/polarity2.jsonl.gz"
PRETRAINED = [family for family in FAMILIES.values() if family.objectives]
# Fields that a family does not have are left out.
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
MARGIN = 0.1  # nats below guessing by frequency: more than a model can gain that does not look at the context


def learn(
    family: FamilySpec, recipe: Path, folder: Path, dataset: list[str] | tuple[str, ...], **changes: object
) -> tuple[TrainingSummary, list[str]]:
    """Pretrain in this process by a recipe of scripts/short_training.py; gives the command line, too."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    flags = {
        "recipe": recipe,
        "tokenizer": folder / "tokenizer",
        "validation_fraction": HELD_OUT,
        "dataloader_workers": 0,
        "output_dir": folder / recipe.stem,
        **changes,
    }
    argv = data_flags(dataset)
    for name, value in flags.items():
        argv += [f"--{name}", *map(str, value if isinstance(value, tuple) else [value])]
    return pretrain(*parse_arguments(PretrainingArguments, LoopArguments, argv=argv)), argv


def data_flags(dataset: list[str] | tuple[str, ...]) -> list[str]:
    """A list of data sets, or a file, that of its translations, and perhaps the mark of their language."""
    if isinstance(dataset, tuple):
        names = ("dataset", "translations", "language_tags")
        return [part for name, value in zip(names, dataset) for part in (f"--{name}", value)]
    return ["--dataset", *dataset]


@pytest.fixture(scope="session")
def news() -> list[list[str]]:
    """The news stories of the demo text, of each sentence the first ten words: 2,700 short rows."""
    pytest.importorskip("gensim", reason="the demo text is part of gensim (extra `demo`)")
    stories = islice(load_documents("demo"), 299)  # they come first
    return [[" ".join(sentence.split()[:10]) for sentence in story] for story in stories]


def write_text(family: FamilySpec, news: list[list[str]], folder: Path) -> list[str] | tuple[str, ...]:
    """The stories; for a family that translates the first six words of each sentence, and these backwards."""
    objective = next(iter(family.objectives.values()))
    text, translation = folder / "text.txt", folder / "reversed.txt"
    if not objective.requires_translations:
        text.write_text("\n\n".join("\n".join(story) for story in news), encoding="utf-8")
        return [str(text)]
    sentences = [sentence.split()[:6] for story in news for sentence in story]
    text.write_text("".join(" ".join(words) + "\n" for words in sentences), encoding="utf-8")
    translation.write_text("".join(" ".join(words[::-1]) + "\n" for words in sentences), encoding="utf-8")
    return (str(text), str(translation), *(["<backwards>"] if objective.requires_language_tags else []))


def train_tokenizer(
    family: FamilySpec, folder: Path, dataset: list[str] | tuple[str, ...], vocab_size: int, held_out: float = HELD_OUT
) -> None:
    if isinstance(dataset, tuple):
        documents = load_documents(dataset[0], translations=dataset[1:2], language_tags=dataset[2:])
    else:
        documents = load_documents(*dataset)
    training, _ = documents.split(held_out)
    family.tokenizer.train(training.texts(), vocab_size=vocab_size).save_pretrained(folder / "tokenizer")


def learn_in_seconds(family: FamilySpec, news: list[list[str]], folder: Path, seed: int = 0) -> TrainingSummary:
    """Pretrain by the recipe of scripts/short_training.py, cut short and made small, as the family's traits say."""
    short_training = family.traits.short_training
    known = [f"{name}={value}" for name, value in SMALL.items() if name in family.config.__dataclass_fields__]
    text = write_text(family, news, folder)
    train_tokenizer(family, folder, text, short_training.vocab_size, held_out=0.08)
    cut: dict[str, object] = {
        "objective": next(iter(family.objectives)),  # a recipe may name one that needs more than this text
        "validation_fraction": 0.08,
        "config_options": (*known, *short_training.config_options),
        "max_length": 32,
        "per_device_batch_size": 16,
        "max_steps": short_training.steps,
        "learning_rate": short_training.learning_rate,
        "lr_scheduler": "constant",
        "lr_reference_targets": 0,
        "seed": seed,
    }
    summary, _ = learn(family, learning_recipes(RECIPES, family.name)[0], folder, text, **cut)
    return summary


@pytest.mark.parametrize("family", PRETRAINED, ids=lambda family: family.name)
def test_pretraining_beats_guessing_by_frequency(family: FamilySpec, news: list[list[str]], tmp_path) -> None:
    summary = learn_in_seconds(family, news, tmp_path)
    if not next(iter(family.objectives.values())).evaluates:
        losses = [record["loss"] for record in summary.curve if "loss" in record]
        assert losses[-1] < 0.5 * losses[0], f"the loss fell from {losses[0]:.3f} to {losses[-1]:.3f} only"
        return
    token_losses = [name for name in summary.baselines if is_token_loss(name, summary.metrics)]
    assert token_losses
    for name in token_losses:
        loss, guess = summary.metrics[f"eval_{name}"], summary.baselines[name]
        assert loss < guess - MARGIN, f"{name} {loss:.3f}, guessing by frequency gets {guess:.3f}"


@pytest.mark.slow
@pytest.mark.parametrize("family", PRETRAINED, ids=lambda family: family.name)
def test_recipe_meets_its_targets(family: FamilySpec, shared_data: Path, tmp_path) -> None:
    """Run the whole recipe (up to three hours); all pretraining targets of scripts/learning.py are met."""
    if next(iter(family.objectives.values())).requires_translations:
        pytest.skip(f"{family.name} translates, whose figure is BLEU: see its card")
    if not next(iter(family.objectives.values())).evaluates or hasattr(
        family.models["AutoModelForPreTraining"], "loss_by_scores"
    ):
        pytest.skip(f"{family.name} has no held-out token loss, which the targets refer to")
    text = [str(shared_data / "corpus" / family.traits.short_training.text), str(shared_data / REVIEWS)]
    train_tokenizer(family, tmp_path, text, 8000)
    start = {}
    for recipe in learning_recipes(RECIPES, family.name):
        _, flags = learn(family, recipe, tmp_path, text, **start)
        start = {"model": tmp_path / recipe.stem}
    criteria = evaluate_pretraining(tmp_path / recipe.stem, flags)
    assert any(criterion.target for criterion in criteria)
    assert [criterion for criterion in criteria if not criterion.is_met] == []
