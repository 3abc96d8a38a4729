"""Recipes, arguments, summaries, checkpoint files, and checks of loaded models."""

import errno
import json
import os
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from labeled_texts import save_tiny
from transformers import (
    AutoTokenizer,
    BertConfig,
    DistilBertConfig,
    LlamaConfig,
    MT5Config,
    PreTrainedConfig,
    PreTrainedModel,
    XLMConfig,
    XLMForQuestionAnswering,
    XLNetConfig,
    XLNetForQuestionAnswering,
)

from hf_ctxmodels import CtxBertConfig, CtxBertForMaskedLM, CtxBertForSequenceClassification, CtxError
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.console import run_script
from hf_ctxmodels.core.flags import REQUIRED, flag, join_choice, split_choice, typed_options
from hf_ctxmodels.downstream.finetuning.arguments import StartingModelArguments
from hf_ctxmodels.downstream.finetuning.finetuning_run import load_config_and_tokenizer
from hf_ctxmodels.downstream.tasks import TASKS, TaskArguments
from hf_ctxmodels.downstream.text2text.pretraining import PretrainingMixtureOptions
from hf_ctxmodels.models.t5 import CtxT5Config, CtxT5EncoderModel
from hf_ctxmodels.models.xlm import CtxXLMConfig, CtxXLMForBeamSearchQuestionAnswering
from hf_ctxmodels.models.xlnet import CtxXLNetForQuestionAnswering
from hf_ctxmodels.objectives import MaskedLM
from hf_ctxmodels.registry import FAMILIES, get_family
from hf_ctxmodels.tokenizers.base import check_tokenizer_matches_model, record_tokenizer_digest
from hf_ctxmodels.training import checkpoint_files
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.dry_run import DryRunArguments
from hf_ctxmodels.training.model_loading import (
    convert_reference_config,
    load_config,
    load_config_file,
    load_model,
    load_tokenizer,
    new_model,
    new_model_without_memory,
    parse_config_options,
    prepare_for_training,
    verify_weights,
)
from hf_ctxmodels.training.pretraining import PretrainingArguments, make_model, make_objective, model_config
from hf_ctxmodels.training.random_state import random_state, set_random_state
from hf_ctxmodels.training.summary import TrainingSummary
from hf_ctxmodels.training.training_log import plot_losses, read_log

RECIPES = sorted(Path(__file__).resolve().parents[2].glob("scripts/recipes/*.yaml"))


@dataclass
class Flags:
    name: str = flag(REQUIRED, "A name.")
    rate: float = flag(0.1, "A rate.")
    steps: int | None = flag(None, "Steps.")
    quick: bool = flag(False, "Be quick.")
    options: list[str] = flag((), "Options.")


def parse(tmp_path: Path, recipe: str, *argv: str) -> Flags:
    (tmp_path / "recipe.yaml").write_text(recipe, encoding="utf-8")
    return parse_arguments(Flags, argv=["--recipe", str(tmp_path / "recipe.yaml"), *argv])[0]


def test_flags_override_recipe(tmp_path):
    recipe = "name: no\nrate: 1e-3\nquick: true\nsteps: null\noptions: {a: 0.5, b: true}\n"
    assert parse(tmp_path, recipe) == Flags("no", 1e-3, None, True, ["a=0.5", "b=true"])
    assert parse(tmp_path, recipe, "--rate", "2", "--options", "c=1") == Flags("no", 2.0, None, True, ["c=1"])


def test_flags_replace_conflicting_flags_of_recipe(tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text("num_train_epochs: 3\noutput_dir: runs\n", encoding="utf-8")
    argv = ["--recipe", str(tmp_path / "recipe.yaml")]
    (options,) = parse_arguments(LoopArguments, argv=[*argv, "--max_steps", "5"])
    assert (options.max_steps, options.num_train_epochs) == (5, None)
    assert "of the recipe, --num_train_epochs is ignored" in capsys.readouterr().err
    with pytest.raises(CtxError, match="given twice"):
        parse_arguments(LoopArguments, argv=[*argv, "--max_steps=5", "--num_train_epochs", "1"])
    (tmp_path / "recipe.yaml").write_text("estimate: true\n", encoding="utf-8")
    for value in (False, True):
        (options,) = parse_arguments(DryRunArguments, argv=[*argv, "--dry_run", str(value).lower()])
        assert (options.dry_run, options.estimate) == (value, not value), "a default value does not conflict"


def test_invalid_recipes_and_flags_raise(tmp_path):
    for recipe, message in (
        ("nmae: x", r"Unknown key 'nmae'.*(?s:.)*name, options, quick, rate, steps"),
        ("- name", "Expected keys and values in a recipe"),
        ("name: [", "not valid YAML"),
    ):
        with pytest.raises(CtxError, match=message):
            parse(tmp_path, recipe)
    with pytest.raises(CtxError, match="cannot be read"):
        parse_arguments(Flags, argv=["--recipe", "nowhere.yaml"])
    with pytest.raises(CtxError, match="--recipe: expected one argument"):
        parse_arguments(Flags, argv=["--recipe", "--name", "x"])
    with pytest.raises(CtxError, match=r"Unknown flag --warmup_step\.(.|\n)*did you mean --warmup_steps\?"):
        parse_arguments(LoopArguments, argv=["--output_dir", "x", "--max_steps", "1", "--warmup_step", "0.1"])


def test_help_shows_description_and_defaults(capsys):
    """Lines of the description are kept; defaults are shown, except None."""
    description = "What it does.\n\n    python script.py --max_steps 1"
    with pytest.raises(SystemExit) as exit_info:
        parse_arguments(LoopArguments, description=description, argv=["--help"])
    assert exit_info.value.code == 0
    output = capsys.readouterr().out
    assert f"{description}\n" in output
    assert "(default: 32)" in output
    assert "None" not in output


def test_pretraining_recipes_are_valid():
    for recipe in RECIPES:
        text = recipe.read_text()
        if "\nfamily: " not in text or "\nlosses:" in text:
            continue
        flags = ["--recipe", str(recipe), "--dataset", "d", "--tokenizer", "t", "--output_dir", "o"]
        pretraining, loop = parse_arguments(PretrainingArguments, LoopArguments, argv=flags)
        family = get_family(pretraining.family)
        assert recipe.stem.startswith(family.name)
        assert loop.max_steps or loop.num_train_epochs
        name, options = split_choice(pretraining.objective)
        objective = family.objectives[name]
        typed_options(objective, options, location=recipe.stem, names=objective.option_help())
        overrides = parse_config_options(pretraining.config_options)
        family.config(**{**family.sizes[pretraining.config or "tiny"], **overrides})


def test_parse_config_options():
    texts = ["hidden_dropout_prob=0.0", "hidden_act=relu", "tie_word_embeddings=false", "layer_norm_eps=1e-6"]
    expected = {"hidden_dropout_prob": 0.0, "hidden_act": "relu", "tie_word_embeddings": False, "layer_norm_eps": 1e-6}
    assert parse_config_options(texts) == expected
    with pytest.raises(CtxError, match="key=value"):
        parse_config_options(["hidden_act"])


def test_parse_objective_options():
    def options(text: str) -> dict[str, object]:
        _, texts = split_choice(f"mlm:{text}")
        return typed_options(MaskedLM, texts, location="--objective mlm", names=MaskedLM.option_help())

    expected = {"mlm_probability": 0.2, "packing": True, "max_predictions": 7}
    assert options("mlm_probability=0.2,packing=true,max_predictions=7") == expected
    for invalid, message in (("rate=1", "option 'rate'"), ("packing", "no value"), ("mlm_probability=x", "invalid")):
        with pytest.raises(CtxError, match=message):
            options(invalid)


def test_options_with_several_values():
    """Values with an equals sign repeat the option, on the command line and in recipes."""
    for text, options in (
        ("q-bert:bits=2,4,groups=128", {"bits": "2,4", "groups": "128"}),
        ("glue:mixing_scale=rte=0.5,mixing_scale=cb=2,text_size=9", {"mixing_scale": "rte=0.5,cb=2", "text_size": "9"}),
    ):
        name, option_strings = split_choice(text)
        assert option_strings == options
        assert join_choice(name, option_strings) == text
    values = typed_options(PretrainingMixtureOptions, options, location="--mixture")
    assert values == {"mixing_scale": ["rte=0.5", "cb=2"], "text_size": 9.0}


def test_run_script(capsys):
    """A CtxError is printed without a traceback; other errors keep theirs."""

    def fail() -> None:
        raise CtxError("Bad.", location="here", hint="so.")

    for main, code in ((fail, 2), (lambda: None, 0)):
        with pytest.raises(SystemExit) as exit_info:
            run_script(main)
        assert exit_info.value.code == code
    assert capsys.readouterr().err.strip() == "CtxError: Bad.\n  where: here\n  Fix: so."
    with pytest.raises(ZeroDivisionError):
        run_script(lambda: 1 / 0)


@pytest.mark.parametrize("size", [1, 1 << 20], ids=["at the end", "while printing"])
def test_closed_pipe_of_the_output_ends_a_script_without_a_message(monkeypatch, capsys, size):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        with pytest.raises(SystemExit) as exit_info:
            run_script(lambda: print("x" * size))
        monkeypatch.undo()
    assert exit_info.value.code == 141
    assert capsys.readouterr().err == ""


def test_broken_pipe_without_poll_is_an_error(monkeypatch, capsys):
    """Windows has no `select.poll`."""
    monkeypatch.delattr("select.poll")

    def fail() -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    with pytest.raises(SystemExit) as exit_info:
        run_script(fail)
    assert exit_info.value.code == 2
    assert "Broken pipe" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_train_epochs": 1.0},
        {"max_steps": 0},
        {"per_device_batch_size": 0},
        {"learning_rate": -1.0},
        {"save_steps": -1},
        {"seed": -1},
        {"lr_scheduler": "linear:min_rate=0.1"},
        {"lr_scheduler": "cosine:min_rate=1"},
    ],
    ids=str,
)
def test_arguments_out_of_range_raise(arguments):
    with pytest.raises(CtxError):
        LoopArguments(output_dir="x", **{"max_steps": 1, **arguments})


def test_random_state_round_trip():
    def sample() -> tuple:
        return random.random(), random.gauss(), np.random.rand(), np.random.randn(), torch.rand(2).tolist()

    sample()
    state = json.loads(json.dumps(random_state()))
    expected = sample()
    sample()
    set_random_state(state)
    assert sample() == expected


def test_moved_files_are_verified(tmp_path):
    for content in (b"old", b"new"):
        (tmp_path / "model.writing").mkdir()
        (tmp_path / "model.writing" / "model.safetensors").write_bytes(content)
        checkpoint_files.move_files(tmp_path / "model.writing", tmp_path)
        verify_weights(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "model.safetensors"]
    (tmp_path / "model.safetensors").write_bytes(b"ney")
    with pytest.raises(CtxError, match=r"model\.safetensors was truncated or changed"):
        verify_weights(tmp_path)


def test_new_model_without_memory(workspace):
    """It has the parameters, ties and buffers of the model, and stores one element per parameter."""
    config = load_config_file(CtxBertConfig, workspace.folder / "exact.json")
    expected, model = (make("AutoModelForPreTraining", config) for make in (new_model, new_model_without_memory))
    shapes = [{name: weight.shape for name, weight in network.named_parameters()} for network in (expected, model)]
    assert shapes[0] == shapes[1]
    assert {len(weight.untyped_storage()) for weight in model.parameters()} == {4}
    assert len({weight.data_ptr() for weight in model.parameters()}) == len(shapes[0])
    assert all(buffer.equal(model.get_buffer(name)) for name, buffer in expected.named_buffers())


def test_estimate_of_half_precision_checkpoint_is_of_float32(tmp_path):
    save_tiny(tmp_path, FAMILIES["bert"], from_transformers=False)
    CtxBertForMaskedLM.from_pretrained(tmp_path, dtype=torch.bfloat16).save_pretrained(tmp_path)
    arguments = PretrainingArguments(dataset=["demo"], model=str(tmp_path), max_length=16)
    family, tokenizer = FAMILIES["bert"], load_tokenizer(tmp_path)
    _, objective = make_objective(family, tokenizer, arguments, 0)
    config = model_config(family, tokenizer, arguments)
    model = make_model(config, objective, tokenizer, arguments, without_memory=True)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def make_checkpoint(folder: Path, step: int) -> Path:
    path = checkpoint_files.checkpoint_path(folder, step)
    temporary = checkpoint_files.temporary_path(path)
    temporary.mkdir()
    (temporary / "a.bin").write_bytes(b"a" * 100)
    checkpoint_files.commit_checkpoint(temporary, path)
    return path


def test_checkpoints_are_verified_and_deleted(tmp_path):
    assert checkpoint_files.latest_checkpoint(tmp_path) is None
    older, newest = make_checkpoint(tmp_path, 9), make_checkpoint(tmp_path, 10)
    assert checkpoint_files.latest_checkpoint(tmp_path) == newest
    for damage in (lambda f: f.write_bytes(b"a" * 99), lambda f: f.write_bytes(b"b" * 100), lambda f: f.unlink()):
        damage(newest / "a.bin")
        with pytest.raises(CtxError, match=rf"(?s)a\.bin.*{older}"):
            checkpoint_files.latest_checkpoint(tmp_path)
    checkpoint_files.delete_old_checkpoints(tmp_path, keep=1)
    assert checkpoint_files.list_checkpoints(tmp_path) == [newest]


def test_checkpoint_with_open_files_is_deleted_later(tmp_path, monkeypatch):
    """On Windows, a directory cannot be renamed while one of its files is memory-mapped."""
    used, _, newest = (make_checkpoint(tmp_path, step) for step in (8, 9, 10))
    rename = Path.rename

    def rename_unused(path, target):
        if path == used:
            raise PermissionError(13, "Access is denied", str(path))
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename_unused)
        checkpoint_files.delete_old_checkpoints(tmp_path, keep=1)
    assert checkpoint_files.list_checkpoints(tmp_path) == [used, newest]
    checkpoint_files.delete_old_checkpoints(tmp_path, keep=1)
    assert checkpoint_files.list_checkpoints(tmp_path) == [newest]


def test_log_summary_and_plot(tmp_path):
    (tmp_path / "training_log.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st', encoding="utf-8")
    assert read_log(tmp_path) == [{"step": 1}, {"step": 2}]
    assert read_log(tmp_path, up_to_step=1) == [{"step": 1}]
    assert plot_losses([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0, "eval_loss": 3.0}], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(CtxError, match=r"no training_summary\.json"):
        TrainingSummary.load(tmp_path)
    (tmp_path / "training_summary.json").write_text('{"unknown": 1}', encoding="utf-8")
    with pytest.raises(CtxError, match="Not a training summary"):
        TrainingSummary.load(tmp_path)


def test_mismatched_tokenizer_raises(workspace, tmp_path):
    with pytest.raises(CtxError, match="no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(CtxError, match="tokenizer cannot be opened"):
        load_tokenizer(tmp_path)

    config = load_config_file(CtxBertConfig, workspace.folder / "exact.json")
    tokenizer = load_tokenizer(workspace.folder / "tokenizer")

    def assert_raises(message: str, max_length: int = 32) -> None:
        with pytest.raises(CtxError, match=message):
            check_tokenizer_matches_model(tokenizer, config, max_length, location="here")

    check_tokenizer_matches_model(tokenizer, config, 32, location="here")
    assert_raises("Inputs of 33 tokens exceed the model's limit of 32", max_length=33)
    assert_raises("Inputs of 2 tokens leave no room", max_length=2)
    record_tokenizer_digest(config, tokenizer)
    check_tokenizer_matches_model(tokenizer, config, location="here")
    config.vocab_size = 81
    tokenizer.add_tokens(["new"])
    check_tokenizer_matches_model(tokenizer, config, location="here")  # the other tokens keep their ids
    record_tokenizer_digest(config, tokenizer)
    tokenizer = load_tokenizer(workspace.folder / "tokenizer")
    assert_raises("not the tokenizer that the model was trained with: the 81 tokens")
    config.vocab_size = 79
    assert_raises("The vocabulary does not fit the model: the tokenizer has 80 tokens, the model has 79 embeddings")


def test_invalid_configurations_raise(tmp_path):
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
    with pytest.raises(CtxError, match="There is no such directory"):
        load_config(tmp_path / "nowhere")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CtxError, match="has an adapter, and no model"):
        load_config(tmp_path / "adapter")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_trained_in_float32(dtype: torch.dtype, tmp_path: Path, capsys) -> None:
    save_tiny(tmp_path, FAMILIES["bert"], from_transformers=False)
    CtxBertForMaskedLM.from_pretrained(tmp_path, dtype=dtype).save_pretrained(tmp_path)
    model = load_model(tmp_path, "AutoModelForMaskedLM", load_config(tmp_path))
    assert model.dtype is dtype
    prepare_for_training(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert f"from {str(dtype).removeprefix('torch.')} to float32" in capsys.readouterr().err
    model.save_pretrained(tmp_path)
    assert load_config(tmp_path).dtype is torch.float32


@pytest.mark.parametrize(
    ("reference", "auto_class", "expected"),
    [
        (BertConfig(), "AutoModel", CtxBertConfig),
        (BertConfig(), "AutoModelForCausalLM", BertConfig),  # the family has no causal head
        (BertConfig(quantization_config={"quant_method": "bitsandbytes"}), "AutoModel", BertConfig),
        (LlamaConfig(), "AutoModel", LlamaConfig),
        (BertConfig(), "AutoModelForSeq2SeqLM", BertConfig),  # UniLM also opens BERT checkpoints
        (DistilBertConfig(), "AutoModelForSequenceClassification", CtxBertConfig),
        (MT5Config(), "AutoModelForSeq2SeqLM", CtxT5Config),
        (XLMConfig(), "AutoModel", CtxXLMConfig),
        (XLMConfig(n_langs=3), "AutoModel", XLMConfig),  # the language of a text is unknown
    ],
)
def test_converted_reference_config(
    reference: PreTrainedConfig, auto_class: str, expected: type[PreTrainedConfig], tmp_path: Path
) -> None:
    """A reference checkpoint is opened as a model of its family, if the family supports it."""
    reference.save_pretrained(tmp_path)
    config = convert_reference_config(load_config(tmp_path), auto_class, tmp_path)
    assert type(config) is expected


def test_tokenizer_without_padding_token(tmp_path: Path) -> None:
    """Released GPT-2 has none: the end-of-text token is used, also in the configuration of a fine-tuned classifier."""
    source = save_tiny(tmp_path, FAMILIES["gpt2"], from_transformers=True)
    for name, field in (("tokenizer_config.json", "pad_token"), ("config.json", "pad_token_id")):
        fields = json.loads((tmp_path / name).read_text())
        del fields[field]
        (tmp_path / name).write_text(json.dumps(fields))
    assert AutoTokenizer.from_pretrained(source).pad_token is None
    task = TASKS["sequence-classification"](TaskArguments())
    config, tokenizer = load_config_and_tokenizer(StartingModelArguments(model=source), task)
    assert config.pad_token_id == tokenizer.pad_token_id == tokenizer.eos_token_id is not None


@pytest.mark.parametrize(
    ("reference", "model_class"),
    [
        (
            XLNetForQuestionAnswering(XLNetConfig(d_model=16, n_layer=1, n_head=2, d_inner=16, vocab_size=40)),
            CtxXLNetForQuestionAnswering,
        ),
        (
            XLMForQuestionAnswering(XLMConfig(emb_dim=16, n_layers=1, n_heads=2, vocab_size=40)),
            CtxXLMForBeamSearchQuestionAnswering,
        ),
    ],
    ids=["xlnet", "xlm"],
)
def test_alternative_head_of_reference_checkpoint(
    reference: PreTrainedModel, model_class: type[PreTrainedModel], tmp_path: Path
) -> None:
    """Beam-search question answering, which is not the class of the auto class."""
    reference.save_pretrained(tmp_path)
    auto_class = "AutoModelForQuestionAnswering"
    config = convert_reference_config(load_config(tmp_path), auto_class, tmp_path)
    model = load_model(tmp_path, auto_class, config, require_head=True)
    assert type(model) is model_class


def test_missing_and_damaged_weights(workspace, tmp_path, capfd):
    """A missing head, or one of another shape, is newly initialized; the encoder must be complete and undamaged."""
    config = load_config_file(CtxBertConfig, workspace.folder / "exact.json")
    CtxBertForMaskedLM(config).save_pretrained(tmp_path / "mlm")
    CtxBertForSequenceClassification(config).save_pretrained(tmp_path / "classifier")
    config = load_config(tmp_path / "mlm")
    load_model(tmp_path / "mlm", "AutoModelForMaskedLM", config)
    errors = capfd.readouterr().err
    assert "newly initialized" not in errors
    assert "sharded" not in errors, "a warning of transformers about tensor parallelism, which is not used"
    config.num_labels = 5
    classifier = load_model(tmp_path / "mlm", "AutoModelForSequenceClassification", config)
    assert classifier.config.num_labels == 5
    assert "newly initialized: " in capfd.readouterr().err
    classifier = load_model(tmp_path / "classifier", "AutoModelForSequenceClassification", config)
    assert classifier.classifier.out_features == 5
    assert "2 weights newly initialized: classifier.bias, classifier.weight" in capfd.readouterr().err

    weights = tmp_path / "mlm" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(CtxError, match="weights are damaged"):
        load_model(tmp_path / "mlm", "AutoModelForMaskedLM", config)
    with pytest.raises(CtxError, match="cannot be opened"):
        load_model(tmp_path / "nowhere", "AutoModelForMaskedLM", config)
    config.num_hidden_layers += 1
    for auto_class in ("AutoModelForSequenceClassification", "AutoModel"):
        with pytest.raises(CtxError, match="weights of the encoder are missing"):
            load_model(tmp_path / "classifier", auto_class, config)


def test_encoder_of_encoder_decoder(tmp_path, capfd):
    """The checkpoint of an encoder alone is loaded as an encoder-decoder with a new decoder."""
    config = CtxT5Config(**FAMILIES["t5"].sizes["tiny"], vocab_size=128)
    CtxT5EncoderModel(config).save_pretrained(tmp_path)
    load_model(tmp_path, "AutoModel", load_config(tmp_path))
    assert "newly initialized: decoder." in capfd.readouterr().err
    config.num_hidden_layers += 1
    with pytest.raises(CtxError, match="weights of the encoder are missing"):
        load_model(tmp_path, "AutoModelForTextEncoding", config)
