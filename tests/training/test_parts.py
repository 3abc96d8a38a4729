"""Recipes, arguments, summaries, optimizer, checkpoint files, loading guards."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from hf_ctxmodels import CtxBertConfig, CtxError
from hf_ctxmodels.core.errors import run_script
from hf_ctxmodels.core.flags import split_choice, typed_options
from hf_ctxmodels.registry import get_family
from hf_ctxmodels.tokenizers.base import check_tokenizer_matches_model, record_tokenizer_digest
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.checkpoint import directory as checkpoint
from hf_ctxmodels.training.checkpoint.training_state import load_random_state, save_random_state
from hf_ctxmodels.training.metrics.summary import TrainingSummary
from hf_ctxmodels.training.metrics.training_log import plot_losses, read_log
from hf_ctxmodels.training.model_loading import (
    load_config,
    load_config_file,
    load_model,
    load_tokenizer,
    parse_config_options,
    verify_weights,
)
from hf_ctxmodels.training.pretraining import PretrainingArguments
from hf_ctxmodels.training.recipe import parse_arguments

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Flags:
    name: str = field(metadata={"help": "A name."})
    rate: float = field(default=0.1, metadata={"help": "A rate."})
    steps: int | None = field(default=None, metadata={"help": "Steps."})
    quick: bool = field(default=False, metadata={"help": "Be quick."})
    options: list[str] = field(default_factory=list, metadata={"help": "Options."})


def parse(tmp_path: Path, recipe: str, *argv: str) -> Flags:
    (tmp_path / "recipe.yaml").write_text(recipe, encoding="utf-8")
    return parse_arguments(Flags, argv=["--recipe", str(tmp_path / "recipe.yaml"), *argv])[0]


def test_a_recipe_gives_defaults_and_flags_override(tmp_path):
    recipe = "name: no\nrate: 1e-3\nquick: true\nsteps: null\noptions: {a: 0.5, b: true}\n"
    assert parse(tmp_path, recipe) == Flags("no", 1e-3, None, True, ["a=0.5", "b=true"])
    assert parse(tmp_path, recipe, "--rate", "2", "--options", "c=1") == Flags("no", 2.0, None, True, ["c=1"])


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("nmae: x", r"Unknown key 'nmae'.*(?s:.)*name, options, quick, rate, steps"),
        ("- name", "mapping of flags"),
        ("name: [", "not valid YAML"),
    ],
)
def test_a_wrong_recipe_is_explained(tmp_path, recipe, message):
    with pytest.raises(CtxError, match=message):
        parse(tmp_path, recipe)


def test_help_keeps_the_lines_of_the_description_and_shows_the_defaults_there_are(capsys):
    with pytest.raises(SystemExit) as exit_:
        parse_arguments(
            LoopArguments, description="What it does.\n\n    python script.py --max_steps 1", argv=["--help"]
        )
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    assert "What it does.\n\n    python script.py --max_steps 1\n" in printed
    assert "(default: 0.0001)" in printed
    assert "None" not in printed


def test_a_misspelt_flag_is_explained():
    flags = ["--output_dir", "x", "--max_steps", "1", "--warmup_step", "0.1"]
    with pytest.raises(CtxError, match=r"--warmup_step 0\.1\.(.|\n)*did you mean --warmup_steps\?"):
        parse_arguments(LoopArguments, argv=flags)


def test_a_missing_recipe_is_explained():
    with pytest.raises(CtxError, match="cannot be read"):
        parse_arguments(Flags, argv=["--recipe", "nowhere.yaml"])


RECIPES = {path: path.read_text() for path in sorted(ROOT.glob("scripts/recipes/*.yaml"))}
PRETRAINING_RECIPES = [path for path, text in RECIPES.items() if "\nfamily: " in text and "\nlosses:" not in text]


def test_recipes_in_the_repository_parse():
    for recipe in PRETRAINING_RECIPES:
        _parse(recipe)


def _parse(recipe):
    given = ["--recipe", str(recipe), "--dataset", "d", "--tokenizer", "t", "--output_dir", "o"]
    pretraining, loop = parse_arguments(PretrainingArguments, LoopArguments, argv=given)
    family = get_family(pretraining.family)
    assert recipe.stem.startswith(family.name)
    assert loop.max_steps or loop.num_train_epochs
    name, options = split_choice(pretraining.objective)
    objective = family.objectives[name]
    typed_options(objective, options, location=recipe.stem, names=objective.option_help())
    family.config(**{**family.sizes[pretraining.config or "tiny"], **parse_config_options(pretraining.config_options)})


def test_options_of_a_configuration():
    texts = ["hidden_dropout_prob=0.0", "hidden_act=relu", "tie_word_embeddings=false", "layer_norm_eps=1e-6"]
    expected = {"hidden_dropout_prob": 0.0, "hidden_act": "relu", "tie_word_embeddings": False, "layer_norm_eps": 1e-6}
    assert parse_config_options(texts) == expected
    with pytest.raises(CtxError, match="key=value"):
        parse_config_options(["hidden_act"])


def test_scripts_print_errors_on_one_screen(capsys):
    def main() -> None:
        raise CtxError("Bad.", location="here", hint="so.")

    with pytest.raises(SystemExit) as exit_:
        run_script(main)
    assert exit_.value.code == 2
    assert capsys.readouterr().err.strip() == "CtxError: Bad.\n  where: here\n  Fix: so."


def test_scripts_leave_unexpected_errors_their_traceback():
    with pytest.raises(ZeroDivisionError):
        run_script(lambda: 1 / 0)
    with pytest.raises(SystemExit) as exit_:
        run_script(lambda: None)
    assert exit_.value.code == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"max_steps": 1, "num_train_epochs": 1.0},
        {"max_steps": 0},
        {"max_steps": 1, "per_device_batch_size": 0},
        {"max_steps": 1, "learning_rate": -1.0},
        {"max_steps": 1, "save_steps": -1},
        {"max_steps": 1, "seed": -1},
        {"max_steps": 1, "lr_scheduler": "linear:min_rate=0.1"},
        {"max_steps": 1, "lr_scheduler": "cosine:min_rate=1"},
    ],
)
def test_arguments_out_of_range(wrong):
    with pytest.raises(CtxError):
        LoopArguments(output_dir="x", **wrong)


def test_random_state_round_trip(tmp_path):
    import random

    import numpy as np

    def draw() -> tuple:
        return random.random(), random.gauss(), np.random.rand(), np.random.randn(), torch.rand(2).tolist()

    draw()
    save_random_state(tmp_path / "state.json")
    expected = draw()
    draw()
    load_random_state(tmp_path / "state.json")
    assert draw() == expected


def test_published_files_have_a_manifest_of_their_own(tmp_path):
    for content in (b"old", b"new"):
        (tmp_path / "model.writing").mkdir()
        (tmp_path / "model.writing" / "model.safetensors").write_bytes(content)
        checkpoint.publish_files(tmp_path / "model.writing", tmp_path)
        verify_weights(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "model.safetensors"]
    (tmp_path / "model.safetensors").write_bytes(b"ney")
    with pytest.raises(CtxError, match=r"model\.safetensors was truncated or changed"):
        verify_weights(tmp_path)


def make_checkpoint(folder: Path, step: int) -> Path:
    path = checkpoint.checkpoint_path(folder, step)
    temporary = checkpoint.temporary_path(path)
    temporary.mkdir()
    (temporary / "a.bin").write_bytes(b"a" * 100)
    checkpoint.commit_checkpoint(temporary, path)
    return path


def test_checkpoints_are_found_verified_and_pruned(tmp_path):
    assert checkpoint.latest_checkpoint(tmp_path) is None
    good, newest = make_checkpoint(tmp_path, 9), make_checkpoint(tmp_path, 10)
    assert checkpoint.latest_checkpoint(tmp_path) == newest
    for damage in (lambda f: f.write_bytes(b"a" * 99), lambda f: f.write_bytes(b"b" * 100), lambda f: f.unlink()):
        damage(newest / "a.bin")
        with pytest.raises(CtxError, match=r"a\.bin") as caught:
            checkpoint.latest_checkpoint(tmp_path)
        assert str(good) in str(caught.value)
    checkpoint.delete_old_checkpoints(tmp_path, keep=1)
    assert checkpoint.list_checkpoints(tmp_path) == [newest]


def test_a_log_line_cut_off_is_left_out(tmp_path):
    (tmp_path / "training_log.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st', encoding="utf-8")
    assert read_log(tmp_path) == [{"step": 1}, {"step": 2}]
    assert read_log(tmp_path, up_to_step=1) == [{"step": 1}]


def test_curve_is_drawn(tmp_path):
    assert plot_losses([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0, "eval_loss": 3.0}], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_summary_is_explained(tmp_path):
    with pytest.raises(CtxError, match=r"no training_summary\.json"):
        TrainingSummary.load(tmp_path)
    (tmp_path / "training_summary.json").write_text('{"unknown": 1}', encoding="utf-8")
    with pytest.raises(CtxError, match="Not a training summary"):
        TrainingSummary.load(tmp_path)


def test_loading_guards(workspace, tmp_path):
    with pytest.raises(CtxError, match="no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(CtxError, match="tokenizer cannot be opened"):
        load_tokenizer(tmp_path)

    config = load_config_file(CtxBertConfig, workspace.folder / "exact.json")
    tokenizer = load_tokenizer(workspace.folder / "tokenizer")
    check_tokenizer_matches_model(tokenizer, config, 32, location="here")
    with pytest.raises(CtxError, match="Inputs of 33 tokens exceed the model's limit of 32"):
        check_tokenizer_matches_model(tokenizer, config, 33, location="here")
    with pytest.raises(CtxError, match="Inputs of 2 tokens leave no room"):
        check_tokenizer_matches_model(tokenizer, config, 2, location="here")
    record_tokenizer_digest(config, tokenizer)
    check_tokenizer_matches_model(tokenizer, config, location="here")
    config.vocab_size = 81
    tokenizer.add_tokens(["new"])
    check_tokenizer_matches_model(tokenizer, config, location="here")  # the others are where they were
    record_tokenizer_digest(config, tokenizer)
    tokenizer = load_tokenizer(workspace.folder / "tokenizer")
    with pytest.raises(CtxError, match="not the tokenizer that the model was trained with: the 81 tokens"):
        check_tokenizer_matches_model(tokenizer, config, location="here")
    config.vocab_size = 79
    with pytest.raises(CtxError, match="the tokenizer has 80 tokens, the model has 79 embeddings"):
        check_tokenizer_matches_model(tokenizer, config, 32, location="here")

    for fields, message in (
        ({"hiden_size": 3}, "has no field 'hiden_size'"),
        ({"hidden_size": "wide"}, "'hidden_size' expected int, got str"),
        ({"hidden_size": 64, "num_attention_heads": 7}, "hidden_size=64 is not a multiple of num_attention_heads=7"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(fields | {"model_type": "ctx-bert"}), encoding="utf-8")
        with pytest.raises(CtxError, match=f"Not a configuration of CtxBertConfig: .*{message}"):
            load_config_file(CtxBertConfig, tmp_path / "config.json")
        with pytest.raises(CtxError, match=f"No usable model configuration: .*{message}"):
            load_config(tmp_path)


def test_damaged_weights_and_new_heads(workspace, tmp_path, capsys):
    from hf_ctxmodels import CtxBertForMaskedLM

    CtxBertForMaskedLM(load_config_file(CtxBertConfig, workspace.folder / "exact.json")).save_pretrained(tmp_path)
    config = load_config(tmp_path)
    load_model(tmp_path, "AutoModelForMaskedLM", config)
    assert "newly initialised" not in capsys.readouterr().err
    config.num_labels = 3
    classifier = load_model(tmp_path, "AutoModelForSequenceClassification", config)
    assert classifier.config.num_labels == 3
    assert "newly initialised: " in capsys.readouterr().err
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(CtxError, match="weights are damaged"):
        load_model(tmp_path, "AutoModelForMaskedLM", config)
    with pytest.raises(CtxError, match="cannot be opened"):
        load_model(tmp_path / "nowhere", "AutoModelForMaskedLM", config)
    with pytest.raises(CtxError, match="No usable model configuration"):
        load_config(tmp_path / "nowhere")


def test_a_head_of_another_shape_starts_anew_and_an_encoder_has_to_be_there(workspace, tmp_path, capsys):
    from hf_ctxmodels import CtxBertForSequenceClassification

    config = load_config_file(CtxBertConfig, workspace.folder / "exact.json")
    CtxBertForSequenceClassification(config).save_pretrained(tmp_path)
    config.num_labels = 5
    assert load_model(tmp_path, "AutoModelForSequenceClassification", config).classifier.out_features == 5
    assert "2 weights newly initialised: classifier.bias, classifier.weight" in capsys.readouterr().err
    config.num_hidden_layers += 1
    with pytest.raises(CtxError, match="weights of the encoder are missing"):
        load_model(tmp_path, "AutoModelForSequenceClassification", config)


def test_objective_options():
    from hf_ctxmodels.objectives import MaskedLM

    def parse(text: str) -> dict[str, object]:
        options = split_choice(f"mlm:{text}")[1]
        return typed_options(MaskedLM, options, location="--objective mlm", names=MaskedLM.option_help())

    expected = {"mlm_probability": 0.2, "packing": True, "max_predictions": 7}
    assert parse("mlm_probability=0.2,packing=true,max_predictions=7") == expected
    for wrong, message in (("rate=1", "option 'rate'"), ("packing", "no value"), ("mlm_probability=x", "invalid")):
        with pytest.raises(CtxError, match=message):
            parse(wrong)
