"""Every family, by its own objective, learns from real text: what it predicts of unseen text beats a stated guess."""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState

from hf_ctxmodels.benchmarks.learning import is_token_loss, judge_pretraining, learning_recipes
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
MARGIN = 0.1  # nats below guessing by frequency: more than a model can gain that does not look at the context


def learn(
    family: FamilySpec, recipe: Path, folder: Path, dataset: list[str] | tuple[str, ...], **changes: object
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
def demo_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo text as a file: to extract it takes seconds."""
    pytest.importorskip("gensim", reason="the demo text is part of gensim (extra `demo`)")
    path = tmp_path_factory.mktemp("demo") / "text.txt"
    path.write_text(join_documents(load_documents("demo")), encoding="utf-8")
    return path


def join_documents(documents: Iterable[list[str]]) -> str:
    """A sentence in each line, an empty line between documents."""
    return "\n\n".join("\n".join(document) for document in documents)


def small_text(family: FamilySpec, demo_text: Path, folder: Path) -> list[str] | tuple[str, ...]:
    """The demo text, a quarter of it where that serves; to translate short sentences of it, and each backwards."""
    objective = next(iter(family.objectives.values()))
    text, translation = folder / "text.txt", folder / "reversed.txt"
    if family.traits.learning.small:
        quarter = islice(load_documents(str(demo_text)), 0, None, 4)
        text.write_text(join_documents(quarter), encoding="utf-8")
        return [str(text)]
    if not objective.reads_translations:
        return [str(demo_text)]
    lines = demo_text.read_text(encoding="utf-8").splitlines()
    sentences = [sentence for sentence in lines if 0 < len(sentence) < 60]
    text.write_text("".join(f"{sentence}\n" for sentence in sentences), encoding="utf-8")
    backwards = (" ".join(sentence.split()[::-1]) for sentence in sentences)
    translation.write_text("".join(f"{sentence}\n" for sentence in backwards), encoding="utf-8")
    return (str(text), str(translation), *(["<backwards>"] if objective.reads_language_tags else []))


def train_tokenizer(family: FamilySpec, folder: Path, dataset: list[str] | tuple[str, ...], vocab_size: int) -> None:
    if isinstance(dataset, tuple):
        documents = load_documents(dataset[0], translations=dataset[1:2], language_tags=dataset[2:])
    else:
        documents = load_documents(*dataset)
    training, _ = documents.split(HELD_OUT)
    family.tokenizer.train(training.texts(), vocab_size=vocab_size).save_pretrained(folder / "tokenizer")


@pytest.mark.parametrize("family", PRETRAINED, ids=lambda family: family.name)
def test_pretraining_beats_guessing_by_frequency(family: FamilySpec, demo_text: Path, tmp_path) -> None:
    """By the recipe of scripts/learning.py, cut short."""
    learning = family.traits.learning
    cut: dict[str, object] = {
        "max_length": 64,
        "per_device_batch_size": 16 if learning.small else 32,
        "max_steps": learning.steps,
        "lr_scheduler": "constant",
    }
    if learning.config_options:
        cut["config_options"] = learning.config_options
    text = small_text(family, demo_text, tmp_path)
    train_tokenizer(family, tmp_path, text, 500 if learning.small else 1000)
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
def test_the_recipe_reaches_what_is_demanded(family: FamilySpec, shared_data: Path, tmp_path) -> None:
    """The whole recipe, up to three hours: every demand of scripts/learning.py on pretraining is met."""
    if next(iter(family.objectives.values())).reads_translations:
        pytest.skip(f"{family.name} translates, whose figure is BLEU: see its card")
    if not next(iter(family.objectives.values())).evaluates or hasattr(
        family.models["AutoModelForPreTraining"], "loss_by_scores"
    ):
        pytest.skip(f"{family.name} has no held-out loss of one token among all, which the demands are for")
    text = [str(shared_data / "corpus" / family.traits.learning.text), str(shared_data / REVIEWS)]
    train_tokenizer(family, tmp_path, text, 8000)
    start = {}
    for recipe in learning_recipes(RECIPES, family.name):
        _, flags = learn(family, recipe, tmp_path, text, **start)
        start = {"model": tmp_path / recipe.stem}
    claims = judge_pretraining(tmp_path / recipe.stem, flags)
    assert any(claim.demanded for claim in claims)
    assert [claim for claim in claims if not claim.reached] == []
