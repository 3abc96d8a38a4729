"""`hf-ctxmodels generate`: translations, continuations, invalid flags; `hf-ctxmodels data pairs`."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_command, save, tiny_pair
from sacrebleu import corpus_bleu
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from hf_ctxmodels import CtxError
from hf_ctxmodels.inference import generate_texts
from hf_ctxmodels.registry import FAMILIES

WORDS = {"red": "rot", "cat": "Katze", "sees": "sieht", "one": "ein", "big": "groß", "dog": "Hund"}


def write_translations(folder: Path, name: str, num_lines: int, seed: int) -> dict[str, Path]:
    """Write texts and their word-by-word translations, in reverse order."""
    rng = random.Random(seed)
    texts = [rng.choices(list(WORDS), k=rng.randint(2, 3)) for _ in range(num_lines)]
    paths = {language: folder / f"{name}.{language}" for language in ("en", "de")}
    paths["en"].write_text("".join(" ".join(text) + ".\n" for text in texts))
    paths["de"].write_text("".join(" ".join(WORDS[word] for word in text[::-1]) + ".\n" for text in texts))
    return paths


RECURRENT = ["embedding_size=16", "num_hidden_layers=1", "hidden_dropout_prob=0"]
ENCODER = ["hidden_size=32", "intermediate_size=128", "initializer_range=0.1", "hidden_dropout_prob=0"]
# Family -> flags, configuration and minimum BLEU; the best constant output has a BLEU of 13.
RUNS: dict[str, tuple[dict[str, Any], list[str], int]] = {
    "cove": ({"max_steps": 80, "learning_rate": 2e-2}, [*RECURRENT, "hidden_size=32"], 50),
    "lmseq2seq": ({"max_steps": 80, "learning_rate": 2e-2}, [*RECURRENT, "hidden_size=32"], 50),
    "laser": ({"max_steps": 150, "learning_rate": 2e-2}, [*RECURRENT, "hidden_size=64"], 20),  # one sentence vector
    "unilm": ({"objective": "masked-seq2seq", "max_steps": 130, "learning_rate": 5e-3}, ENCODER, 80),
    "ernie_gen": ({"objective": "noisy-seq2seq", "max_steps": 130, "learning_rate": 5e-3}, ENCODER, 80),
}


@pytest.mark.parametrize("family", RUNS)
def test_translation_from_text_to_output_file(family: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Tokenizer, pretraining and translation by the commands; outputs do not depend on the batch size."""
    train, test = write_translations(tmp_path, "train", 600, seed=0), write_translations(tmp_path, "test", 40, seed=1)
    data = {"dataset": train["en"], "translations": train["de"], "family": family}
    if family == "laser":
        data["language_tags"] = "<de>"
    flags, sizes, minimum_bleu = RUNS[family]
    tokenizer, model, output_file = (tmp_path / name for name in ("tokenizer", "model", "written.txt"))
    vocab_size = 120 if sizes is ENCODER else 50  # byte-pair tokens, or words
    assert run_command("data", "tokenizer", **data, vocab_size=vocab_size, output_dir=tokenizer) == 0
    assert sizes is ENCODER or "unknown tokens   0.00%" in capsys.readouterr().out
    flags |= {"per_device_batch_size": 32, "dataloader_workers": 0, "save_steps": 0, "max_length": 20}
    flags |= {"output_dir": model, "config_options": sizes, "tokenizer": tokenizer, "validation_fraction": 0.05}
    assert run_command("pretrain", **data, **flags) == 0
    capsys.readouterr()
    files = {"model": model, "input": test["en"], "references": test["de"], "output_file": output_file}
    assert run_command("generate", **files, decoding="beam:num_beams=3", batch_size=7, max_new_tokens=10) == 0
    printed = capsys.readouterr().out
    texts, references = output_file.read_text().splitlines(), test["de"].read_text().splitlines()
    assert f"BLEU {corpus_bleu(texts, [references]).score:.2f}  nrefs:1|case:mixed" in printed
    bleu = corpus_bleu(texts, [references], lowercase=True).score
    assert bleu > minimum_bleu, "the model has not learned to translate and reverse"
    loaded, tok = AutoModelForSeq2SeqLM.from_pretrained(model), AutoTokenizer.from_pretrained(tokenizer)
    sources = test["en"].read_text().splitlines()
    torch.manual_seed(0)
    assert generate_texts(loaded, tok, sources, num_beams=3, batch_size=40, max_new_tokens=10) == texts
    assert generate_texts(loaded, tok, sources[:1]) == generate_texts(loaded, tok, sources)[:1]
    with pytest.raises(CtxError, match="Text 1"):
        generate_texts(loaded, tok, ["a cat", " "])
    if "objective" not in flags:  # the first objective is translation
        (tmp_path / "text.txt").write_text("red cat.\n")
        flags |= {"dataset": tmp_path / "text.txt", "family": family, "validation_fraction": 0}
        assert run_command("pretrain", "--overwrite", **flags) == 2
        assert "--translations" in capsys.readouterr().err


CAUSAL_LM_FAMILIES = [name for name, family in FAMILIES.items() if "AutoModelForCausalLM" in family.models]


def test_batched_prompts_match_unpadded_generation(tmp_path: Path) -> None:
    """A padded batch of prompts gives the outputs of `generate` for each prompt alone, in all families."""
    texts = ["red cat", "one big dog sees", "cat", "a red dog sees one big cat"]
    for name in CAUSAL_LM_FAMILIES:
        model, tokenizer = tiny_pair(name, "AutoModelForCausalLM", [" ".join(texts)], seed=1, initializer_range=0.3)
        model.generation_config.eos_token_id = None
        expected = []
        for text in texts:
            ids = tokenizer(text, return_special_tokens_mask=True)
            while ids["special_tokens_mask"][-1]:
                for column in ids.values():
                    column.pop()
            prompt = torch.tensor([ids["input_ids"]])
            generated = model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)[0, prompt.shape[1] :]
            expected.append(tokenizer.decode(generated, skip_special_tokens=True).strip())
        assert generate_texts(model, tokenizer, texts, max_new_tokens=5, batch_size=3) == expected, name
        assert any(expected), name
        with pytest.raises(CtxError, match=r"Text 1 has no words"):
            generate_texts(model, tokenizer, ["a cat", " "], max_new_tokens=5)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny causal language model, and text files."""
    folder, fields = tmp_path_factory.mktemp("decoder"), {"max_position_embeddings": 16, "initializer_range": 0.3}
    save(folder / "model", *tiny_pair("gpt2", "AutoModelForCausalLM", ["a red cat sees one big dog"], **fields))
    for name, text in (("in", "a red cat\none dog\n"), ("one", "a cat\n"), ("none", "")):
        (folder / f"{name}.txt").write_text(text)
    return folder


def test_sampling_seed(decoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    files = {"model": decoder / "model", "input": decoder / "in.txt", "max_new_tokens": 8}
    outputs = []
    for number, seed in enumerate([0, 0, 1]):
        output_file = tmp_path / f"{number}.txt"
        assert run_command("generate", **files, decoding=f"sample:seed={seed}", output_file=output_file) == 0
        outputs.append(output_file.read_text())
    assert outputs[0] == outputs[1] != outputs[2]
    assert all(len(text.splitlines()) == 2 for text in outputs)
    assert f"2 texts generated, in {tmp_path / '2.txt'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"decoding": "greedy:temperature=0.5"}, r"Unknown option 'temperature'"),
        ({"decoding": "beams"}, r"did you mean beam\?"),
        ({"decoding": "sample:seed=-1"}, r"seed=-1 is out of range(.|\n)*at least 0 and at most 4,294,967,295"),
        ({"max_new_tokens": 15}, r"Text 0 .*has \d+ tokens; the model has 16 positions(.|\n)*in\.txt:1"),
        ({"max_new_tokens": 16}, r"16 new tokens and a text exceed the model's 16 positions(.|\n)*at most 13\."),
        ({"input": "{folder}"}, r"is a directory, expected a file(.|\n)*use the path of a file in the directory"),
        ({"language": "<de>"}, r"does not generate '<de>'(.|\n)*leave the language out"),
        ({"references": "{folder}/one.txt"}, r"2 texts and 1 references"),
        ({"references": "{folder}/in.txt", "metrics": "f1"}, r"no metric 'f1'"),
        ({"input": "{folder}/none.txt"}, r"The file is empty"),
    ],
)
def test_invalid_flags_and_files(flags: dict, message: str, decoder: Path, capsys: pytest.CaptureFixture) -> None:
    flags = {name: str(value).replace("{folder}", str(decoder)) for name, value in flags.items()}
    assert run_command("generate", **{"model": decoder / "model", "input": decoder / "in.txt"} | flags) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(("num_constant", "is_warned"), [(9, True), (8, False)])
def test_warning_if_outputs_are_constant(num_constant, is_warned, decoder, tmp_path, capsys, monkeypatch) -> None:
    (tmp_path / "in.txt").write_text("\n".join(f"{'a ' * number}cat" for number in range(10)) + "\na cat" * 9)
    outputs = ["dog"] * num_constant + [f"{number} cats" for number in range(10 - num_constant)]
    monkeypatch.setattr("hf_ctxmodels.cli.generate.generate_texts", lambda *_, **__: [*outputs, *[outputs[1]] * 9])
    assert run_command("generate", model=decoder / "model", input=tmp_path / "in.txt") == 0
    assert ("warning: (nearly) all of 10 inputs have the output 'dog'; hint:" in capsys.readouterr().err) == is_warned


def test_out_of_range_values_raise(decoder: Path, capsys: pytest.CaptureFixture) -> None:
    files = {"model": decoder / "none", "input": decoder / "in.txt"}
    for flags in (
        *({"batch_size": 0}, {"max_new_tokens": 0}, {"max_length": -1}, {"no_repeat_ngram_size": -1}),
        *({"decoding": f"sample:{option}"} for option in ("top_k=-1", "temperature=0", "top_p=1.5", "num_beams=0")),
    ):
        assert run_command("generate", **files, **flags) == 2
        ((name, value),) = flags.items()
        name = str(value).partition(":")[2].partition("=")[0] or name
        assert f"{name}=" in capsys.readouterr().err, flags
    model, tokenizer = (cls.from_pretrained(decoder / "model") for cls in (AutoModelForCausalLM, AutoTokenizer))
    for options in ({"batch_size": 0}, {"num_beams": 0}, {"max_length": 0}, {"num_return_sequences": 2}):
        with pytest.raises(CtxError, match=next(iter(options))):
            generate_texts(model, tokenizer, ["a red cat"], **options)
    assert generate_texts(model, tokenizer, []) == []
    with pytest.raises(CtxError, match="texts is a str, expected a list of strings"):
        generate_texts(model, tokenizer, "cat")
    with pytest.raises(CtxError, match=r"texts\[1\] is a NoneType, expected a string"):
        generate_texts(model, tokenizer, ["cat", None])


def test_encoder_raises(decoder: Path, capsys: pytest.CaptureFixture) -> None:
    model, tokenizer = tiny_pair("bert", "AutoModel", ["a red cat"])
    assert run_command("generate", model=save(decoder / "bert", model, tokenizer), input=decoder / "in.txt") == 2
    assert "CtxBertConfig has no head that generates text" in capsys.readouterr().err
    with pytest.raises(CtxError, match="CtxBertModel does not generate text"):
        generate_texts(model, tokenizer, ["a red cat"])


def test_data_pairs_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    articles = [f"A red cat number {number}\nOne big dog sees it. The dog runs.\n" for number in range(20)]
    (tmp_path / "news.txt").write_text("\n".join(articles))
    flags = {"kind": "summaries", "dataset": tmp_path / "news.txt", "min_source_words": 5}
    assert run_command("data", "pairs", **flags, output_dir=tmp_path / "pairs") == 0
    assert "18 pairs for training and 2 for validation" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "pairs" / "train.jsonl").read_text().splitlines()]
    for side in ("source", "target"):
        assert (tmp_path / "pairs" / f"train.{side}.txt").read_text().splitlines() == [row[side] for row in rows]
    assert rows[0] == {"source": "One big dog sees it. The dog runs.", "target": rows[0]["target"]}
    assert run_command("data", "pairs", **flags, output_dir=tmp_path / "pairs") == 2
    assert "--overwrite" in capsys.readouterr().err
    flags["min_source_words"] = 50
    assert run_command("data", "pairs", **flags, output_dir=tmp_path / "none") == 2
    assert "0 pairs for training and 0 for validation" in capsys.readouterr().err
