"""`hf-ctxmodels evaluate transfer`: a tagger trained in one language and tested in others."""

import json
from pathlib import Path

import pytest
import torch
from commands import command_output, save
from entities import NAMES, PLACES, VERBS, save_bert, tagged_sentences, write_entities
from transformers import AutoModel, AutoModelForTokenClassification, AutoTokenizer
from zoo import Case, tiny_config

from hf_ctxmodels import CtxError
from hf_ctxmodels.downstream.tasks import TASKS, TaskArguments
from hf_ctxmodels.downstream.tasks.languages import LanguageFile
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.freezing import freeze_encoder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "wikiann"
    folder.mkdir(parents=True)
    for language, split, size in (
        *(("en", split, size) for split, size in (("train", 80), ("dev", 16), ("test", 16))),
        *((language, "test", 12) for language in ("de", "fr")),
    ):
        rows = tagged_sentences(language, size, seed=f" {split}")
        write_entities(folder / f"{language}.{split}.txt", language, rows)
    return tmp_path / "data"


@pytest.mark.parametrize("frozen", [False, True])
def test_table_of_languages(data: Path, tmp_path: Path, frozen: bool) -> None:
    encoder, output = save_bert(tmp_path / "encoder", "AutoModel"), tmp_path / "output"
    flags = {"model": encoder, "task": "ner", "train": "en", "test": "en,de,fr", "data_dir": data, "max_length": 32}
    flags |= {"output_dir": output, "max_steps": 60, "learning_rate": "1e-2", "per_device_batch_size": 16}
    printed = command_output("evaluate transfer", *(["--freeze", "encoder"] if frozen else []), **flags)
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
    assert f"{mean:.4f}" in next(line for line in printed.splitlines() if line.startswith("mean of others"))

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
    model = save(tmp_path / "xlm", family.models["AutoModel"](tiny_config(family, **sizes)), tokenizer)
    flags = ["--model", model, "--task", "ner", "--data_dir", data, "--max_steps", 2, "--max_length", 32]
    command_output("evaluate transfer", *flags, "--test", "en,de", "--output_dir", tmp_path / "output")
    assert AutoModelForTokenClassification.from_pretrained(tmp_path / "output").config.default_lang == 1
    other = ["--test", f"fi={data}/wikiann/de.test.txt", "--output_dir", tmp_path / "other"]
    assert "no embedding of the language 'fi'" in command_output("evaluate transfer", *flags, *other, fails=True)


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
