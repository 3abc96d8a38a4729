"""scripts/train_tokenizer.py as a user runs it."""

import subprocess
import sys
from pathlib import Path

from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]


def run(*flags):
    command = [sys.executable, str(ROOT / "scripts" / "train_tokenizer.py"), *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_a_tokenizer_is_trained_from_a_recipe_and_flags(tmp_path, documents):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join("\n".join(document) for document in documents))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"family: bert\ndataset: {text}\nvocab_size: 90\noptions:\n  do_lower_case: false\n")
    done = run("--recipe", recipe, "--vocab_size", 150, "--output_dir", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert 90 < len(tokenizer) <= 150, "the flag overrides the recipe"
    assert tokenizer.do_lower_case is False
    assert f"{len(tokenizer)} tokens of 150" in done.stdout
    assert "38 documents of" in done.stdout
    assert "held out         2 documents" in done.stdout
    assert "unknown tokens   0.00%" in done.stdout


def test_a_wrong_option_is_one_screen_that_lists_the_right_ones(tmp_path):
    done = run(
        "--family", "bert", "--dataset", "demo", "--vocab_size", 150, "--output_dir", tmp_path, "--options", "x=1"
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "--options x=1" in done.stderr
    assert "do_lower_case=True" in done.stderr
