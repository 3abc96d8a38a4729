"""`hf-ctxmodels evaluate transfer`: a tagger trained in one language and tested in others."""

import json
import random
from pathlib import Path

import pytest
import torch
from commands import flag_list
from forked import run_forked
from transformers import AutoModel, AutoModelForTokenClassification, AutoTokenizer
from zoo import Case, tiny_config

from hf_ctxmodels import CtxError
from hf_ctxmodels.downstream.tasks import TASKS, TaskArguments
from hf_ctxmodels.downstream.tasks.languages import LanguageFile
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.freezing import freeze_encoder

COMMAND = ("-m", "hf_ctxmodels", "evaluate", "transfer")
NAMES, PLACES = ["Anna", "Boris", "Clara", "David"], ["Paris", "Rome", "Athens", "Lima"]
VERBS = {"en": "saw", "de": "sah", "fr": "vit"}


def write_entities(folder: Path, language: str, split: str, size: int, verb: str) -> Path:
    """Sentences in WikiANN's form, with entities that are the same in all languages."""
    rng = random.Random(f"{language} {split}")
    rows = ([(rng.choice(NAMES), "B-PER"), (verb, "O"), (rng.choice(PLACES), "B-LOC")] for _ in range(size))
    rows = [row[:: rng.choice([1, -1])] for row in rows]
    blocks = ["\n".join(f"{language}:{word}\t{tag}" for word, tag in row) for row in rows]
    path = folder / f"{language}.{split}.txt"
    path.write_text("\n\n".join(blocks) + "\n")
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "wikiann"
    folder.mkdir(parents=True)
    for split, size in (("train", 80), ("dev", 16), ("test", 16)):
        write_entities(folder, "en", split, size, VERBS["en"])
    for language in ("de", "fr"):
        write_entities(folder, language, "test", 12, VERBS[language])
    return tmp_path / "data"


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    family = FAMILIES["bert"]
    tokenizer = family.tokenizer.train([" ".join([*NAMES, *PLACES, *VERBS.values()])] * 20, vocab_size=120)
    torch.manual_seed(0)
    config = tiny_config(family, vocab_size=len(tokenizer), initializer_range=0.2, hidden_dropout_prob=0.1)
    for part in (family.models["AutoModel"](config), tokenizer):
        part.save_pretrained(tmp_path / "encoder")
    return tmp_path / "encoder"


@pytest.mark.parametrize("frozen", [False, True])
def test_table_of_languages(data: Path, encoder: Path, tmp_path: Path, frozen: bool) -> None:
    output = tmp_path / "output"
    flags = {"model": encoder, "task": "ner", "train": "en", "test": "en,de,fr", "data_dir": data, "max_length": 32}
    flags |= {"output_dir": output, "max_steps": 60, "learning_rate": "1e-2", "per_device_batch_size": 16}
    done = run_forked(*COMMAND, *flag_list(**flags), *(["--freeze", "encoder"] if frozen else []))
    assert done.returncode == 0, done.stderr
    result = json.loads((output / "transfer.json").read_text())
    rows = {row["language"]: row for row in result["languages"]}
    assert [(name, row["examples"]) for name, row in rows.items()] == [("en", 16), ("de", 12), ("fr", 12)]
    assert rows["en"]["metrics"]["f1"] > (0.6 if frozen else 0.9)

    model, tokenizer = AutoModelForTokenClassification.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    training = TASKS["token-classification"](TaskArguments()).read_file(str(data / "wikiann" / "en.train.txt"))
    for language in ("de", "fr"):  # as predicted sentence by sentence
        task = TASKS["token-classification"](TaskArguments())
        examples = task.read_file(str(data / "wikiann" / f"{language}.test.txt"))
        assert not any(":" in word for sentence in examples for word in sentence.words)
        task.configure(model.config, examples, examples)
        predictions = []
        for sentence in examples:
            encoding = tokenizer([sentence.words], is_split_into_words=True, return_tensors="pt")
            best, words = model(**encoding).logits[0].argmax(-1).tolist(), encoding.word_ids(0)
            predictions.append([model.config.id2label[best[words.index(i)]] for i in range(len(sentence.words))])
        expected = task.score(examples, predictions)
        assert rows[language]["metrics"] == pytest.approx(expected)
        baseline = task.score(examples, task.baseline(training, examples))
        assert rows[language]["baseline"] == pytest.approx(baseline)
    mean = (rows["de"]["metrics"]["f1"] + rows["fr"]["metrics"]["f1"]) / 2
    assert f"{mean:.4f}" in next(line for line in done.stdout.splitlines() if line.startswith("mean of others"))

    before, after = AutoModel.from_pretrained(encoder).state_dict(), model.base_model.state_dict()
    same = [torch.equal(before[name], value) for name, value in after.items() if "pooler" not in name]
    assert all(same) == frozen


def test_language_embeddings(data: Path, tmp_path: Path) -> None:
    """Each file is read in its language, which the model must have."""
    family = FAMILIES["xlm"]
    texts = [f"<{language}> {' '.join([*NAMES, *PLACES, verb])}" for language, verb in VERBS.items()] * 20
    tokenizer = family.tokenizer.train(texts, vocab_size=120)
    sizes = {"vocab_size": len(tokenizer), "n_langs": 3, "use_lang_emb": True, "lang2id": tokenizer.lang2id}
    torch.manual_seed(0)
    for part in (family.models["AutoModel"](tiny_config(family, **sizes)), tokenizer):
        part.save_pretrained(tmp_path / "xlm")
    flags = ["--model", tmp_path / "xlm", "--task", "ner", "--data_dir", data, "--max_steps", 2, "--max_length", 32]
    done = run_forked(*COMMAND, *flags, "--test", "en,de", "--output_dir", tmp_path / "output")
    assert done.returncode == 0, done.stderr
    assert AutoModelForTokenClassification.from_pretrained(tmp_path / "output").config.default_lang == 1
    done = run_forked(*COMMAND, *flags, "--test", f"fi={data}/wikiann/de.test.txt", "--output_dir", tmp_path / "other")
    assert done.returncode == 2
    assert "no embedding of the language 'fi'" in done.stderr


def test_files_of_languages(data: Path, tmp_path: Path) -> None:
    named = LanguageFile.find("es=some.txt", "ner", "test", None)
    assert (named.language, named.file) == ("es", Path("some.txt"))
    train = LanguageFile.find("en", "ner", "train", str(data))
    assert train.split("dev").file == data / "wikiann" / "en.dev.txt"
    with pytest.raises(CtxError, match=r"No files fi\.test\.txt"):
        LanguageFile.find("fi", "ner", "test", str(data))
    for treebank in ("ewt", "gum"):
        (tmp_path / f"en_{treebank}-ud-test.conllu.gz").touch()
    with pytest.raises(CtxError, match=r"2 files(.|\n)*en_gum-ud-test(.|\n)*en=FILE"):
        LanguageFile.find("en", "pos", "test", str(tmp_path))


def test_frozen_encoder() -> None:
    """A frozen encoder has no dropout and no gradients in training mode; its pooler is trained."""
    model = Case(FAMILIES["bert"], "AutoModelForSequenceClassification").model(hidden_dropout_prob=0.5)
    freeze_encoder(model)
    model.train()
    assert model.training
    assert not any(module.training for module in model.base_model.modules())
    model(torch.tensor([[5, 6, 7]]), labels=torch.tensor([1])).loss.backward()
    moved = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert moved == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert any("pooler" in name for name in moved)
    assert not any("layers" in name or "embeddings" in name for name in moved)
    tied = Case(FAMILIES["t5"], "AutoModelForSeq2SeqLM").model(tie_word_embeddings=True)
    for encoder in (model.base_model, tied):
        with pytest.raises(CtxError, match="no trainable weights outside its encoder"):
            freeze_encoder(encoder)
