"""Every family, by its own objective, learns from real text: what it predicts of unseen text beats a stated guess."""

from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState

from hf_ctxmodels.benchmarks.learning import is_token_loss, judge_pretraining, learning_recipes
from hf_ctxmodels.data import load_documents
from hf_ctxmodels.registry import FAMILIES, Family
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.pretraining import PretrainingArguments, pretrain
from hf_ctxmodels.training.recipe import parse_arguments
from hf_ctxmodels.training.summary import TrainingSummary

RECIPES = Path(__file__).resolve().parents[2] / "scripts" / "recipes"
HELD_OUT = 0.02
TEXT = {"albert": "news_*.txt.gz"}  # the order of segments shows in short documents; others learn from everything
REVIEWS = "glue_like/movie_reviews/polarity2.jsonl.gz"
PRETRAINED = [family for family in FAMILIES.values() if family.objectives]
STEPS = {"xlnet": 450, "word2vec": 600}  # the last to leave the plateau of how frequent words are; others need 300
MARGIN = 0.1  # nats below guessing by frequency: more than a model can gain that does not look at the context


def learn(
    family: Family, recipe: Path, folder: Path, dataset: list[str] | tuple[str, ...], **changes: object
) -> tuple[TrainingSummary, list[str]]:
    """Pretrain in this process by a recipe of scripts/learning.py; gives the command line, too."""
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
    argv = [*data_flags(dataset), *(str(part) for name, value in flags.items() for part in (f"--{name}", value))]
    return pretrain(*parse_arguments(PretrainingArguments, LoopArguments, argv=argv)), argv


def data_flags(dataset: list[str] | tuple[str, ...]) -> list[str]:
    """A list of data sets, or a file, that of its translations, and perhaps the mark of their language."""
    if isinstance(dataset, tuple):
        names = ("dataset", "translations", "dataset_marks")
        return [part for name, value in zip(names, dataset) for part in (f"--{name}", value)]
    return ["--dataset", *dataset]


def small_text(family: Family, folder: Path) -> list[str] | tuple[str, ...]:
    """The demo text; for a family that translates short sentences of it, and each with its words backwards."""
    objective = next(iter(family.objectives.values()))
    if not objective.reads_translations:
        return ["demo"]
    sentences = [sentence for document in load_documents("demo") for sentence in document if len(sentence) < 60]
    text, translation = folder / "text.txt", folder / "reversed.txt"
    text.write_text("".join(f"{sentence}\n" for sentence in sentences), encoding="utf-8")
    backwards = (" ".join(sentence.split()[::-1]) for sentence in sentences)
    translation.write_text("".join(f"{sentence}\n" for sentence in backwards), encoding="utf-8")
    return (str(text), str(translation), *(["<backwards>"] if objective.marks_languages else []))


def train_tokenizer(family: Family, folder: Path, dataset: list[str] | tuple[str, ...], vocab_size: int) -> None:
    if isinstance(dataset, tuple):
        documents = load_documents(dataset[0], translations=dataset[1:2], marks=dataset[2:])
    else:
        documents = load_documents(*dataset)
    training, _ = documents.split(HELD_OUT)
    family.tokenizer.train(training.texts(), vocab_size=vocab_size).save_pretrained(folder / "tokenizer")


@pytest.mark.parametrize("family", PRETRAINED, ids=lambda family: family.name)
def test_pretraining_beats_guessing_by_frequency(family: Family, tmp_path) -> None:
    """By the recipe of scripts/learning.py, cut short to a minute."""
    pytest.importorskip("gensim", reason="the demo text is part of gensim (extra `demo`)")
    cut = {
        "max_length": 64,
        "per_device_batch_size": 32,
        "max_steps": STEPS.get(family.name, 300),
        "lr_scheduler": "constant",
    }
    text = small_text(family, tmp_path)
    train_tokenizer(family, tmp_path, text, 1000)
    summary, _ = learn(family, learning_recipes(RECIPES, family.name)[0], tmp_path, text, **cut)
    if not next(iter(family.objectives.values())).evaluates:
        losses = [record["loss"] for record in summary.curve if "loss" in record]
        assert losses[-1] < 0.5 * losses[0], f"the loss fell from {losses[0]:.3f} to {losses[-1]:.3f} only"
        return
    judged = [name for name in summary.baselines if is_token_loss(name, summary.metrics)]
    assert judged
    for name in judged:
        loss, guess = summary.metrics[f"eval_{name}"], summary.baselines[name]
        assert loss < guess - MARGIN, f"{name} {loss:.3f}, guessing by frequency gets {guess:.3f}"


@pytest.mark.slow
@pytest.mark.parametrize("family", PRETRAINED, ids=lambda family: family.name)
def test_the_recipe_reaches_what_is_demanded(family: Family, shared_data: Path, tmp_path) -> None:
    """The whole recipe, up to half an hour: every demand of scripts/learning.py on pretraining is met."""
    if next(iter(family.objectives.values())).reads_translations:
        pytest.skip(f"{family.name} translates, whose figure is BLEU: see its card")
    if not next(iter(family.objectives.values())).evaluates or hasattr(
        family.models["AutoModelForPreTraining"], "loss_by_scores"
    ):
        pytest.skip(f"{family.name} has no held-out loss of one token among all, which the demands are for")
    text = [str(shared_data / "corpus" / TEXT.get(family.name, "[!t]*.txt.gz")), str(shared_data / REVIEWS)]
    train_tokenizer(family, tmp_path, text, 8000)
    start = {}
    for recipe in learning_recipes(RECIPES, family.name):
        _, flags = learn(family, recipe, tmp_path, text, **start)
        start = {"model": tmp_path / recipe.stem}
    claims = judge_pretraining(tmp_path / recipe.stem, flags)
    assert any(claim.demanded for claim in claims)
    assert [claim for claim in claims if not claim.reached] == []
