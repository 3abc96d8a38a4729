"""The command `hf-ctxmodels data tokenizer`."""

import pytest
from commands import run_command
from forked import run_forked
from transformers import AutoTokenizer

from hf_ctxmodels.cli.train_tokenizer import TokenizerArguments, next_command, parse_training_options
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.data import DataArguments
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.pretraining import PretrainingArguments


@pytest.fixture
def text_file(tmp_path, documents):
    (tmp_path / "text.txt").write_text("\n\n".join("\n".join(document) for document in documents))
    return tmp_path / "text.txt"


def test_recipe_and_flags(text_file, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"family: bert\ndataset: {text_file}\nvocab_size: 90\noptions:\n  do_lower_case: false\n")
    flags = ["--recipe", recipe, "--vocab_size", "150", "--output_dir", tmp_path / "out"]
    process = run_forked("-m", "hf_ctxmodels", "data", "tokenizer", *flags)
    assert process.returncode == 0, process.stderr
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert 90 < len(tokenizer) <= 150, "the flag overrides the recipe"
    assert tokenizer.do_lower_case is False
    assert f"{len(tokenizer)} tokens (150 requested)" in process.stdout
    assert "38 documents of" in process.stdout
    assert "held out         2 documents" in process.stdout
    assert "unknown tokens   0.00%" in process.stdout


def test_resampled_languages(text_file, tmp_path, capsys):
    (tmp_path / "small.txt").write_text("Smørrebrød spises her. Kaffe drikkes.")
    for alpha, is_in_vocabulary in ((1.0, False), (0.0, True)):
        flags = ["--family", "bert", "--vocab_size", 150, "--options", "min_frequency=9", "--sampling_alpha", alpha]
        data = ["--dataset", text_file, tmp_path / "small.txt", "--validation_fraction", 0]
        assert run_command("data", "tokenizer", *flags, *data, "--output_dir", tmp_path / f"out-{alpha}") == 0
        tokens = AutoTokenizer.from_pretrained(tmp_path / f"out-{alpha}").get_vocab()
        assert ("kaffe" in tokens) is is_in_vocabulary
    assert "text.txt" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("family", "data", "command"),
    [
        ("bert", {}, "pretrain --family bert --tokenizer out --dataset a.txt --max_steps"),
        ("laser", {"translations": ["b.txt"], "language_tags": ["<de>"]}, "--translations b.txt"),
        ("laser", {"translations": ["b.txt"], "language_tags": ["<de>"]}, "--language_tags <de>"),
        ("bert", {"document_separator": "line"}, "--document_separator line"),
        ("cvt", {}, "finetune sequence-classification --family cvt:tokenizer=out --train_file"),
    ],
)  # fmt: skip
def test_next_command(family, data, command):
    arguments = TokenizerArguments(family=family, vocab_size=9, output_dir="out")
    assert command in " ".join(map(str, next_command(arguments, DataArguments(dataset=["a.txt"], **data))))


@pytest.mark.parametrize("family", FAMILIES)
def test_all_families(text_file, tmp_path, documents, family):
    options = ["model_max_length=64", *(["languages=[en, de]"] if family == "elmo" else [])]
    flags = ["--family", family, "--dataset", text_file, "--vocab_size", 300, "--options", *options]
    assert run_command("data", "tokenizer", *flags, "--output_dir", tmp_path / "out") == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert type(tokenizer) is FAMILIES[family].tokenizer
    assert family != "elmo" or tokenizer.languages == ["en", "de"]
    assert tokenizer.model_max_length == 64
    sentence = documents[0][0]
    assert tokenizer.unk_token_id not in tokenizer(sentence).input_ids
    assert tokenizer.decode(tokenizer(sentence).input_ids, skip_special_tokens=True).lower().startswith("the cat")


@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        (["--options", "x=1"], ["--options x=1", "do_lower_case=True"]),
        (["--options", "min_frequency=lots"], ["min_frequency takes a value like 2, not 'lots'"]),
        (["--options", "min_frequency={{"], ["Not a YAML value", "--options min_frequency={{"]),
        (["--dataset", "gone.txt"], ["No such file", "gone.txt"]),
        (["--validation_fraction", "0.9"], ["validation_fraction=0.9"]),
    ],
    ids=["wrong option", "wrong value", "no YAML", "missing file", "impossible split"],
)
def test_invalid_arguments(tmp_path, capsys, flags, messages):
    command = ["--family", "bert", "--dataset", "demo", "--vocab_size", "150", "--output_dir", str(tmp_path), *flags]
    assert run_command("data", "tokenizer", *command) == 2
    stderr = capsys.readouterr().err
    assert all(message in stderr for message in messages)
    assert len(stderr.splitlines()) < 20


def test_commands_hold_out_same_documents(tmp_path):
    (tmp_path / "a.txt").write_text("\n\n".join(f"w{index}" for index in range(60)))
    flags = ["--dataset", str(tmp_path / "a.txt"), "--validation_fraction", "0.1"]
    tokenizer_flags = ["--family", "bert", "--vocab_size", "150", "--output_dir", "o", *flags]
    pretraining_flags = ["--tokenizer", "t", "--output_dir", "o", "--max_steps", "1", "--seed", "7", *flags]
    _, tokenizer_data = parse_arguments(TokenizerArguments, DataArguments, argv=tokenizer_flags)
    model_data, _ = parse_arguments(PretrainingArguments, LoopArguments, argv=pretraining_flags)
    splits = [list(split) for split in model_data.load()]
    assert splits == [list(split) for split in tokenizer_data.load()]
    assert [len(split) for split in splits] == [54, 6]
    model_data.validation_fraction = 0.0
    all_documents, held_out = model_data.load()
    assert (len(list(all_documents)), held_out) == (60, None)


def test_whole_number_of_a_float_option() -> None:
    options = parse_training_options(FAMILIES["t5"].tokenizer, ["character_coverage=1"])
    assert options == {"character_coverage": 1.0}
