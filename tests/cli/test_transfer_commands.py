"""Cross-lingual transfer in the commands: tasks, replaced embeddings, language adapters and tags."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import command_output, flag_list, run_in_two_processes, save, tiny_pair
from datasets import Dataset
from entities import NAMES, PLACES, VERBS, save_tiny_bert, tagged_sentences, write_wikiann
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForTokenClassification, AutoTokenizer, BertConfig
from zoo import Case, tiny_config

from hf_ctxmodels import CtxElmoTokenizer, CtxError
from hf_ctxmodels.architectures.sentence_encoder import encode_sentences
from hf_ctxmodels.cli.transfer import language_directories
from hf_ctxmodels.data.text_files import read_text
from hf_ctxmodels.downstream.adapters import add_adapter, save_adapter
from hf_ctxmodels.downstream.tasks import TASKS, TaskArguments
from hf_ctxmodels.downstream.tasks.languages import LanguageFile, split_entries, split_language
from hf_ctxmodels.evaluation.languages import example_texts, main_script
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.freezing import freeze_encoder

WORDS = {
    "en": (["Anna", "Boris", "Clara"], "saw", ["Paris", "Rome", "Lima"]),
    "de": (["Dieter", "Emil", "Frieda"], "sah", ["Essen", "Trier", "Wien"]),
}
EMBEDDING_WEIGHTS = {"bert.embeddings.word_embeddings.weight", "mlm_head.decoder.bias"}
FLAGS = ["--max_length", 24, "--dataloader_workers", 0, "--learning_rate", "2e-2"]


def predict_tags(model: Any, tokenizer: Any, words: Sequence[str]) -> list[str]:
    """The tags of a single sentence, predicted at the first token of each word."""
    encoding = tokenizer([words], is_split_into_words=True, return_tensors="pt")
    label_ids, word_ids = model(**encoding).logits[0].argmax(-1).tolist(), encoding.word_ids(0)
    return [model.config.id2label[label_ids[word_ids.index(index)]] for index in range(len(words))]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts and NER files in two languages, an English masked LM, and a tokenizer for each language."""
    folder, family = tmp_path_factory.mktemp("transfer"), FAMILIES["bert"]
    for language, (names, verb, places) in WORDS.items():
        rows = tagged_sentences(language, 64, WORDS)
        (folder / f"{language}.txt").write_text("\n\n".join(" ".join(word for word, _ in row) for row in rows) + "\n")
        for split in ("train", "dev", "test"):
            write_wikiann(folder / f"{language}.{split}.txt", language, rows)
        tokenizer = family.tokenizer.train([" ".join([*names, verb, *places])] * 20, vocab_size=80 + len(language))
        tokenizer.save_pretrained(folder / f"tokenizer-{language}")
    english_tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer-en")
    torch.manual_seed(0)
    model = family.models["AutoModelForMaskedLM"](
        tiny_config(family, vocab_size=len(english_tokenizer), initializer_range=0.2, hidden_dropout_prob=0.0)
    )
    save(folder / "en", model, english_tokenizer)
    return folder


@pytest.fixture(scope="module")
def german(workspace: Path) -> Path:
    """The English model with German embeddings, trained by the command."""
    flags = {"recipe": "artetxe_embeddings", "max_steps": 6, "save_steps": 3, "per_device_batch_size": 8}
    command_output("pretrain", *german_args(workspace), *flag_list(**flags, output_dir=workspace / "de"), *FLAGS)
    return workspace / "de"


def german_args(workspace: Path) -> list[object]:
    source = ["--model", workspace / "en", "--tokenizer", workspace / "tokenizer-de"]
    return [*source, "--dataset", workspace / "de.txt", "--objective", "mlm"]


def test_only_embeddings_are_trained_and_resumed(workspace: Path, german: Path) -> None:
    initial, trained = load_file(workspace / "en" / "model.safetensors"), load_file(german / "model.safetensors")
    assert initial.keys() == trained.keys() > EMBEDDING_WEIGHTS
    assert all(torch.equal(initial[key], trained[key]) for key in initial if key not in EMBEDDING_WEIGHTS)
    checkpoint = load_file(german / "checkpoint-3" / "model.safetensors")
    assert not any(torch.equal(checkpoint[key], trained[key]) for key in EMBEDDING_WEIGHTS)
    resumed_run = workspace / "resumed"
    shutil.copytree(german, resumed_run)
    shutil.rmtree(resumed_run / "checkpoint-6")
    flags = [*german_args(workspace), "--recipe", "artetxe_embeddings", "--max_steps", 6, "--save_steps", 3, *FLAGS]
    command_output("pretrain", *flags, "--per_device_batch_size", 8, "--output_dir", resumed_run, "--resume")
    resumed = load_file(resumed_run / "model.safetensors")
    assert all(torch.equal(resumed[key], trained[key]) for key in trained)
    args = [*flags, "--per_device_batch_size", 2, "--gradient_accumulation_steps", 4]
    command_output("pretrain", *args, "--output_dir", workspace / "accumulated")
    args = [*flags, "--per_device_batch_size", 4, "--output_dir", workspace / "two-processes"]
    run_in_two_processes("pretrain", *args)
    for name in ("accumulated", "two-processes"):
        weights = load_file(workspace / name / "model.safetensors")
        assert all(torch.allclose(weights[key], trained[key], atol=1e-4) for key in trained), name

    loaded = AutoModel.from_pretrained(german)
    vocab_size = len(AutoTokenizer.from_pretrained(german))
    assert loaded.config.vocab_size == vocab_size == len(loaded.get_input_embeddings().weight)
    for args, message in (
        (["--adapter", "madx-language"], "--adapter cannot be combined with --train_only"),
        (["--model", ""], "no model is given.\n  where: --train_only"),
    ):
        command = [*german_args(workspace), "--family", "bert", "--train_only", "embeddings", "--max_steps", 1, *args]
        if args[0] == "--model":
            command = command[2:-2]
        assert message in command_output("pretrain", *command, "--output_dir", workspace / "none", fails=True)


def test_transfer_with_replaced_embeddings(workspace: Path, german: Path) -> None:
    """The reported accuracy is that of the tagger with German embeddings and tokenizer."""
    out = workspace / "transfer"
    flags = ["--model", workspace / "en", "--task", "ner", "--data_dir", workspace, *FLAGS]
    flags += ["--test", "de,en", "--recipe", "artetxe_task", "--num_train_epochs", 30]
    narrow_model = workspace / "narrow"
    AutoModel.from_config(tiny_config(FAMILIES["bert"], hidden_size=8)).save_pretrained(narrow_model)
    shutil.copy(workspace / "en" / "tokenizer.json", narrow_model)
    shutil.copy(workspace / "en" / "tokenizer_config.json", narrow_model)
    for embeddings, message in (
        (f"fr={german}", "no checkpoint with embeddings of the language 'de'"),
        (f"de={narrow_model}", "a model with hidden_size=8, but this model has 32"),
    ):
        invalid_flags = flag_list(language_embeddings=embeddings, output_dir=workspace / "none")
        assert message in command_output("evaluate transfer", *flags, *invalid_flags, fails=True)
    assert not (workspace / "none").exists(), "errors are raised before training"
    command_output("evaluate transfer", *flags, "--language_embeddings", f"de={german}", "--output_dir", out)
    rows = {row["language"]: row["metrics"] for row in json.loads((out / "transfer.json").read_text())["languages"]}
    assert rows["en"]["f1"] > 0.9, "the English embeddings are restored"
    tagger, initial = load_file(out / "model.safetensors"), load_file(workspace / "en" / "model.safetensors")
    table = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(tagger[table], initial[table])
    assert not any(torch.equal(tagger[name], initial[name]) for name in tagger if "layers" in name and "weight" in name)

    model = AutoModelForTokenClassification.from_pretrained(out)
    model.resize_token_embeddings(len(AutoTokenizer.from_pretrained(german)), mean_resizing=False)
    model.get_input_embeddings().weight.data.copy_(load_file(german / "model.safetensors")[table])
    correct = []
    for sentence in tagged_sentences("de", 64, WORDS):
        words, tags = zip(*sentence, strict=True)
        correct += map(str.__eq__, predict_tags(model.eval(), AutoTokenizer.from_pretrained(german), words), tags)
    assert rows["de"]["accuracy"] == pytest.approx(sum(correct) / len(correct))


def test_language_adapters_are_checked_before_training(workspace: Path) -> None:
    """An adapter for a model of another width, and a folder without an adapter, raise."""
    for name, size in (("good", {}), ("wide", {"hidden_size": 64})):
        config = tiny_config(FAMILIES["bert"], vocab_size=99, **size)
        model = AutoModelForMaskedLM.from_config(config)
        add_adapter(model, name, "madx-language")
        save_adapter(model, name, workspace / "adapters" / name)
    flags = ["--model", workspace / "en", "--task", "ner", "--data_dir", workspace, "--max_steps", 1, "--test", "de"]
    flags += ["--adapter", "madx-task:name=tagger", "--output_dir", workspace / "untrained"]
    good = workspace / "adapters" / "good"
    for invalid_path, message in (
        (workspace / "adapters" / "wide", "The adapter is for models of width 64"),
        (workspace / "adapters", "use one of its subdirectories: good, wide"),
    ):
        adapters = f"en={good},de={invalid_path}"
        assert message in command_output("evaluate transfer", *flags, "--language_adapters", adapters, fails=True)
    adapters = f"en={good},fr={good}"
    assert "found en, fr" in command_output("evaluate transfer", *flags, "--language_adapters", adapters, fails=True)
    assert not (workspace / "untrained").exists()


def test_transfer_with_language_tags_of_elmo(workspace: Path, tmp_path: Path) -> None:
    """ELMo reads the words of each file after its language tag, also after reloading the tagger."""
    tokenizer = CtxElmoTokenizer.train(["<en> a", "<de> a"], vocab_size=9, min_count=1, languages=["en", "de"])
    family = FAMILIES["elmo"]
    torch.manual_seed(0)
    config = tiny_config(family, num_characters=tokenizer.num_characters, num_languages=2, vocab_size=len(tokenizer))
    save(tmp_path / "elmo", family.models["AutoModel"](config), tokenizer)
    flags = ["--model", tmp_path / "elmo", "--task", "ner", "--data_dir", workspace, "--freeze", "encoder", *FLAGS]
    command_output("evaluate transfer", *flags, "--max_steps", 20, "--test", "de", "--output_dir", tmp_path / "run")
    (row,) = json.loads((tmp_path / "run" / "transfer.json").read_text())["languages"]
    model, saved = (cls.from_pretrained(tmp_path / "run") for cls in (AutoModelForTokenClassification, AutoTokenizer))
    assert saved.language == "en"
    num_correct = dict.fromkeys(("en", "de"), 0)
    for sentence in tagged_sentences("de", 64, WORDS):
        words = [word for word, _ in sentence]
        for language in num_correct:
            tagged = tokenizer([f"<{language}>", *words], is_split_into_words=True)
            saved.language = language
            encoding = saved([words], is_split_into_words=True, return_tensors="pt")
            assert encoding.input_ids[0, 1:].tolist() == tagged.input_ids[2:]
            label_ids = model.eval()(**encoding).logits[0, 1:-1].argmax(-1).tolist()
            pairs = zip(label_ids, sentence, strict=True)
            num_correct[language] += sum(model.config.id2label[label] == tag for label, (_, tag) in pairs)
    assert row["metrics"]["accuracy"] == pytest.approx(num_correct["de"] / (3 * 64))


@pytest.mark.slow
def test_transfer_with_separate_layers_and_vocabularies(workspace: Path, tmp_path: Path) -> None:
    """Two processes pretrain although their batches lack a language; language layers can be frozen for a task."""
    texts = {"dataset": [workspace / "en.txt", workspace / "de.txt"], "language_tags": ["<en>", "<de>"]}
    tokenizer = {"family": "xlm", "vocab_size": 160, "options": "separate_vocabularies=true"}
    command_output("data tokenizer", **texts, **tokenizer, output_dir=tmp_path / "tokenizer")
    model = {"family": "xlm", "config": "tiny", "config_options": "num_language_layers=1", "objective": "mlm"}
    loop = {"max_steps": 4, "per_device_batch_size": 1, "max_length": 16, "dataloader_workers": 0}
    run_in_two_processes(
        "pretrain", **texts, **model, **loop, tokenizer=tmp_path / "tokenizer", output_dir=tmp_path / "model"
    )
    flags = ["--model", tmp_path / "model", "--task", "ner", "--data_dir", workspace, "--test", "en,de", *FLAGS]
    flags += ["--freeze", "language-layers", "--max_steps", 2]
    command_output("evaluate transfer", *flags, "--output_dir", tmp_path / "tagger")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "tagger"))
    changed = {name for name, weight in after.items() if name in before and not torch.equal(weight, before[name])}
    assert any(name.startswith("xlm.layers.1.") for name in changed)
    assert not any(name.startswith("xlm.layers.0.") for name in changed)
    languages = [name for name in before if ".languages." in name]
    assert len(languages) == 2 * len([name for name in before if name.startswith("xlm.layers.1.")])
    plain_flags = ["--model", workspace / "en", *flags[2:]]
    error = command_output("evaluate transfer", *plain_flags, "--output_dir", tmp_path / "failed", fails=True)
    assert "no separate layers of each language" in error


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "wikiann"
    folder.mkdir(parents=True)
    for language, split, size in (
        *(("en", split, size) for split, size in (("train", 80), ("dev", 16), ("test", 16))),
        *((language, "test", 12) for language in ("de", "fr")),
    ):
        sentences = tagged_sentences(language, size, seed=f" {split}")
        write_wikiann(folder / f"{language}.{split}.txt", language, sentences)
    return tmp_path / "data"


@pytest.mark.parametrize("frozen", [False, True])
def test_transfer_table(data: Path, tmp_path: Path, frozen: bool) -> None:
    encoder, output = save_tiny_bert(tmp_path / "encoder", "AutoModel"), tmp_path / "output"
    flags = {"model": encoder, "task": "ner", "train": "en", "test": "en,de,fr", "data_dir": data, "max_length": 32}
    flags |= {"output_dir": output, "max_steps": 60, "learning_rate": "1e-2", "per_device_batch_size": 16}
    printed = command_output("evaluate transfer", *(["--freeze", "encoder"] if frozen else []), **flags)
    result = json.loads((output / "transfer.json").read_text())
    rows = {row["language"]: row for row in result["languages"]}
    assert [(name, row["examples"]) for name, row in rows.items()] == [("en", 16), ("de", 12), ("fr", 12)]
    assert rows["en"]["metrics"]["f1"] > (0.6 if frozen else 0.9)

    model, tokenizer = AutoModelForTokenClassification.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    training = TASKS["token-classification"](TaskArguments()).read_file(str(data / "wikiann" / "en.train.txt"))
    for language in ("de", "fr"):  # against predictions for single sentences
        task = TASKS["token-classification"](TaskArguments())
        examples = task.read_file(str(data / "wikiann" / f"{language}.test.txt"))
        assert not any(":" in word for sentence in examples for word in sentence.words)
        task.configure(model.config, examples, examples)
        predictions = [predict_tags(model, tokenizer, sentence.words) for sentence in examples]
        expected = task.score(examples, predictions)
        assert rows[language]["metrics"] == pytest.approx(expected)
        baseline = task.score(examples, task.baseline(training, examples))
        assert rows[language]["baseline"] == pytest.approx(baseline)
        assert rows[language]["gap"]["f1"] == pytest.approx(rows["en"]["metrics"]["f1"] - expected["f1"])
        subwords, training_subwords = (
            {subword for sentence in side for word in sentence.words for subword in tokenizer.tokenize(word)}
            for side in (examples, training)
        )
        union = subwords | training_subwords
        assert rows[language]["overlap"]["types"] == pytest.approx(len(subwords & training_subwords) / len(union))
        assert rows[language]["overlap"]["tokens"] == pytest.approx(2 / 3), "only the verb differs"
        assert rows[language]["script"] == "Latin"
    mean = (rows["de"]["metrics"]["f1"] + rows["fr"]["metrics"]["f1"]) / 2
    assert f"{mean:.4f}" in next(line for line in printed.splitlines() if line.startswith("mean of others"))
    assert result["source"] == rows["en"]

    before, after = AutoModel.from_pretrained(encoder).state_dict(), model.base_model.state_dict()
    is_unchanged = [torch.equal(before[name], value) for name, value in after.items() if "pooler" not in name]
    assert all(is_unchanged) == frozen


@pytest.mark.parametrize("language", ["de", "zh"])
def test_every_test_language_has_embeddings(language: str) -> None:
    """The training language keeps the embeddings of the model."""
    arguments = SimpleNamespace(language_adapters=None, language_embeddings="sw=directory")
    with pytest.raises(CtxError, match=f"no checkpoint with embeddings of the language '{language}'"):
        language_directories(arguments, BertConfig(), ["en", "sw", language])


def test_transfer_with_language_embeddings(data: Path, tmp_path: Path) -> None:
    """Each file is read in its language; a language without embedding raises."""
    texts = [f"<{language}> {' '.join([*NAMES, *PLACES, verb])}" for language, verb in VERBS.items()]
    fields = {"n_langs": 3, "use_lang_emb": True, "lang2id": {language: n for n, language in enumerate(sorted(VERBS))}}
    model = save(tmp_path / "xlm", *tiny_pair("xlm", "AutoModel", texts, vocab_size=120, **fields))
    flags = ["--model", model, "--task", "ner", "--data_dir", data, "--max_steps", 2, "--max_length", 32]
    command_output("evaluate transfer", *flags, "--test", "en,de", "--output_dir", tmp_path / "output")
    assert AutoModelForTokenClassification.from_pretrained(tmp_path / "output").config.default_lang == 1
    invalid = ["--test", f"fi={data}/wikiann/de.test.txt", "--output_dir", tmp_path / "other"]
    assert "no embedding of the language 'fi'" in command_output("evaluate transfer", *flags, *invalid, fails=True)


COLORS = {"en": ("red", "blue", "is"), "de": ("rot", "blau", "ist"), "fr": ("rouge", "bleu", "est")}


def write_pairs(file: Path, language: str, size: int = 32) -> Path:
    """Write pairs without a header, labeled by whether both texts have the same color."""
    *colors, verb = COLORS[language]
    rows = [(colors[number % 2], colors[number // 2 % 2]) for number in range(size)]
    file.write_text("".join(f"{verb} {a}\t{verb} {b}\t{'same' if a == b else 'other'}\n" for a, b in rows))
    return file


def test_transfer_with_translated_training_files(tmp_path: Path) -> None:
    """The gap is computed against the validation file if the training language is not tested."""
    texts = [" ".join([*words, "Anna", "Boris"]) for words in COLORS.values()]
    fields = {"vocab_size": 120, "initializer_range": 0.2, "hidden_dropout_prob": 0.0}
    model = save(tmp_path / "encoder", *tiny_pair("bert", "AutoModel", texts, **fields))
    for language in COLORS:
        write_pairs(tmp_path / f"colors.test.{language}.tsv", language)
    train = write_pairs(tmp_path / "train.tsv", "en")
    flags = {"model": model, "task": "sequence-classification", "train": f"en={train}", "data_dir": tmp_path}
    flags |= {"text_columns": "1,2", "label_column": 3, "max_length": 16, "max_steps": 1, "learning_rate": "1e-2"}
    flags |= {"validation_file": tmp_path / "colors.test.en.tsv"}
    printed = command_output("evaluate transfer", **flags, test="de,fr", output_dir=tmp_path / "one")
    result = json.loads((tmp_path / "one" / "transfer.json").read_text())
    assert result["source"]["language"] == "en (dev)"
    assert [row["file"] for row in result["languages"]] == ["colors.test.de.tsv", "colors.test.fr.tsv"]
    assert "en (dev)" in printed
    assert "trained on 32 examples in en" in printed
    translated = ",".join(f"{name}={tmp_path / f'colors.test.{name}.tsv'}" for name in ("de", "fr"))
    printed = command_output(
        "evaluate transfer", **flags, translated_train=translated, test="de", output_dir=tmp_path / "three"
    )
    assert "trained on 96 examples in en, de, fr" in printed
    (row,) = json.loads((tmp_path / "three" / "transfer.json").read_text())["languages"]
    assert row["overlap"] == {"types": pytest.approx(3 / 9), "tokens": 1.0}
    for changes, message in (
        ({"pooling": "mean"}, "The task sequence-classification does not use it"),
        ({"translated_train": "de=missing.tsv"}, "missing.tsv"),
        ({"label_column": 2}, "does not occur in the training file"),
    ):
        invalid_flags = flags | {"test": "de", "output_dir": tmp_path / "none"} | changes
        assert message in command_output("evaluate transfer", **invalid_flags, fails=True)


def test_transfer_with_datasets(tmp_path: Path) -> None:
    """The splits for training, validation and test of directories that `datasets` loads, also for retrieval."""
    texts = [" ".join([*words, "Anna", "Boris"]) for words in COLORS.values()]
    model = save(tmp_path / "encoder", *tiny_pair("bert", "AutoModel", texts, vocab_size=120))
    for language in COLORS:
        rows = [line.split("\t") for line in write_pairs(tmp_path / "pairs.tsv", language).read_text().splitlines()]
        columns = dict(zip(("one", "two", "label"), zip(*rows), strict=True))
        for split, size in (("train", 24), ("validation", 16), ("test", 8)):
            (tmp_path / language).mkdir(exist_ok=True)
            dataset = Dataset.from_dict({name: values[:size] for name, values in columns.items()})
            dataset.to_parquet(tmp_path / language / f"{split}-00000-of-00001.parquet")
    tests = f"de={tmp_path}/de,fr={tmp_path}/fr:split=train"
    flags = {"model": model, "test": tests, "text_columns": "one,two"}
    training = {"train": f"en={tmp_path}/en", "label_column": "label", "max_length": 16, "max_steps": 1}
    command_output(
        "evaluate transfer", **flags, **training, task="sequence-classification", output_dir=tmp_path / "output"
    )
    result = json.loads((tmp_path / "output" / "transfer.json").read_text())
    assert [(row["file"], row["examples"]) for row in result["languages"]] == [("de", 8), ("fr", 24)]
    assert (result["source"]["file"], result["source"]["examples"]) == ("en", 16)
    command_output("evaluate transfer", **flags, task="retrieval", pooling="mean", output_dir=tmp_path / "retrieval")
    result = json.loads((tmp_path / "retrieval" / "transfer.json").read_text())
    assert [(row["file"], row["examples"]) for row in result["languages"]] == [("de", 8), ("fr", 24)]


def test_question_answering_transfer(tmp_path: Path) -> None:
    """XQuAD's format: one file per language, without a split in its name."""
    for language, (first, second, verb) in COLORS.items():
        context = f"Anna {verb} {first} . Boris {verb} {second} ."
        questions = [
            {
                "id": name,
                "question": f"{name} {verb}",
                "answers": [{"text": color, "answer_start": context.index(color)}],
            }
            for name, color in (("Anna", first), ("Boris", second))
        ]
        data = {"data": [{"title": "", "paragraphs": [{"context": context, "qas": questions}]}]}
        (tmp_path / f"xquad.{language}.json").write_text(json.dumps(data))
    texts = [" ".join([*words, "Anna", "Boris", "."]) for words in COLORS.values()]
    model = save(tmp_path / "encoder", *tiny_pair("bert", "AutoModel", texts, vocab_size=120))
    flags = {"model": model, "task": "question-answering", "data_dir": tmp_path, "max_length": 32, "max_steps": 1}
    flags |= {"validation_file": tmp_path / "xquad.en.json", "test": "en,de,fr", "output_dir": tmp_path / "run"}
    printed = command_output("evaluate transfer", **flags)
    rows = json.loads((tmp_path / "run" / "transfer.json").read_text())["languages"]
    assert [(row["language"], row["examples"]) for row in rows] == [("en", 2), ("de", 2), ("fr", 2)]
    assert "range: f1 0 to 100" in printed


def test_semantic_role_transfer(tmp_path: Path) -> None:
    """PropBank spans are reduced to head words, as in Universal Propositions; untrained roles are missed."""
    spans = ["1 the 2 _ (ARG0*", "2 cat 3 _ *)", "3 saw 0 see.01 (V*)", "4 dogs 3 _ (ARG1*)"]
    (tmp_path / "en.conll").write_text("\n\n".join(["\n".join(spans)] * 8) + "\n")
    columns = "{}\t{}\t_\t_\t_\t_\t2\tdep\t{}\t{}"
    words = [("Katzen", "_", "_", "A0"), ("sahen", "Y", "see.01", "_"), ("gestern", "_", "_", "AM-TMP")]
    rows = [f"{columns.format(number, *word[:-1])}\t{word[-1]}" for number, word in enumerate(words, 1)]
    (tmp_path / "de-up-test.conllu").write_text("\n".join(rows) + "\n")
    model = save(
        tmp_path / "encoder", *tiny_pair("bert", "AutoModel", ["the cat saw dogs Katzen sahen"], vocab_size=90)
    )
    flags = {"model": model, "task": "semantic-role-labeling", "train": f"en={tmp_path}/en.conll", "head_column": 3}
    flags |= {"validation_file": tmp_path / "en.conll", "text_columns": 2, "label_column": 4, "test": "de"}
    flags |= {"data_dir": tmp_path, "max_steps": 30, "learning_rate": "2e-2", "output_dir": tmp_path / "run"}
    flags |= {"max_length": 32}
    error = command_output("evaluate transfer", **flags, fails=True)
    assert "de-up-test.conllu" in error, "the columns of both formats differ"
    assert not (tmp_path / "run").exists(), "test files are read before training"
    lines = [line.split() for line in spans]
    propbank = ["\t".join([*line[:2], "_", line[2], "_", *line[3:]]) for line in lines]
    (tmp_path / "en.conll").write_text("\n\n".join(["\n".join(propbank)] * 8) + "\n")
    del flags["text_columns"], flags["label_column"]
    command_output("evaluate transfer", **(flags | {"head_column": 4}))
    result = json.loads((tmp_path / "run" / "transfer.json").read_text())
    assert result["source"]["metrics"]["f1"] == 1
    assert result["languages"][0]["metrics"]["recall"] <= 0.5, "the training file has no ARGM-TMP"
    assert result["languages"][0]["examples"] == 1


def test_retrieval_transfer(tmp_path: Path, shared_data: Path) -> None:
    """Tatoeba accuracies equal the argmax over cosines of sentence vectors."""
    rows = {}
    for language in ("de", "fr"):
        lines = read_text(shared_data / "multilingual" / "tatoeba" / f"tatoeba.en-{language}.tsv.gz").splitlines()[:60]
        (tmp_path / f"tatoeba.en-{language}.tsv").write_text("\n".join(lines) + "\n")
        rows[language] = [line.split("\t") for line in lines]
    texts = [text for pairs in rows.values() for pair in pairs for text in pair]
    model = save(tmp_path / "encoder", *tiny_pair("bert", "AutoModel", texts, vocab_size=400))
    flags = {"model": model, "task": "retrieval", "data_dir": tmp_path, "pooling": "mean", "test": "de,fr"}
    printed = command_output("evaluate transfer", **flags, output_dir=tmp_path / "run")
    result = json.loads((tmp_path / "run" / "transfer.json").read_text())
    encoder, tokenizer = AutoModel.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    for row in result["languages"]:
        sides = zip(*rows[row["language"]], strict=True)
        english, foreign = (encode_sentences(encoder, tokenizer, side, pooling="mean") for side in sides)
        cosines = torch.nn.functional.cosine_similarity(foreign[:, None], english[None], dim=2)
        for direction, scores in (("to_en", cosines), ("from_en", cosines.T)):
            expected = (scores.argmax(1) == torch.arange(60)).float().mean()
            assert row["metrics"][direction] == pytest.approx(float(expected))
        assert row["baseline"]["to_en"] > 0.1, "names are the same in both languages"
        assert row["script"] == "Latin"
        assert 0 < row["overlap"]["types"] < row["overlap"]["tokens"] < 1
    assert "table saved" in printed
    assert not (tmp_path / "run" / "config.json").exists(), "nothing is trained"
    for changes, message in (
        ({"train_examples": 3}, "The task retrieval does not use it"),
        ({"text_columns": "1"}, "Expected the columns of two languages, got 1"),
        ({"test": "fi"}, "No file"),
        ({"train": "en=mnli.tsv"}, "Retrieval has no training file"),
    ):
        assert message in command_output(
            "evaluate transfer", **(flags | changes), output_dir=tmp_path / "none", fails=True
        )


@pytest.mark.parametrize(
    ("name", "folder", "language", "size", "columns"),
    [
        ("sequence-classification", "multilingual/xnli", "de", 5010, ("1,2", "3")),
        ("sequence-classification", "multilingual/pawsx", "fr", 1982, ("2,3", "4")),
        ("regression", "multilingual/stsb", "es", 1379, ("1,2", "3")),
        ("question-answering", "qa", "es", 1190, (None, None)),
        ("semantic-role-labeling", "srl/up", "de", 977, (None, None)),
        ("pos", "multilingual/ud", "fi", 1555, (None, None)),
        ("ner", "multilingual/wikiann", "fr", 10_000, (None, None)),
    ],
)
def test_benchmark_files(shared_data: Path, name: str, folder: str, language: str, size: int, columns: Any) -> None:
    """Test files of the benchmarks are found by name, and their texts are in the script of the language."""
    source = LanguageFile.find(language, name, "test", str(shared_data / folder))
    arguments = TaskArguments(text_columns=columns[0], label_column=columns[1])
    examples = TASKS[name if name in TASKS else "token-classification"](arguments).read_file(str(source.file))
    assert len(examples) == size if name != "semantic-role-labeling" else len(examples) > size
    texts = example_texts(examples)
    assert main_script(texts) == "Latin"
    assert len(texts) > size / 20


def test_find_language_files(data: Path, tmp_path: Path) -> None:
    named = LanguageFile.find("es=some.txt", "ner", "test", None)
    assert (named.language, named.file) == ("es", "some.txt")
    with pytest.raises(CtxError, match=r"(?s)'es' has no file.*pass es=FILE, or --data_dir"):
        LanguageFile.find("es", "ner", "test", None)
    train = LanguageFile.find("en", "ner", "train", str(data))
    assert train.validation_file == str(data / "wikiann" / "en.dev.txt")
    assert LanguageFile("en", "org/name:config=en,split=train").validation_file == "org/name:config=en,split=validation"
    assert split_entries("de=org/name:config=de,split=test, fr=a.tsv") == [
        "de=org/name:config=de,split=test",
        "fr=a.tsv",
    ]
    with pytest.raises(CtxError, match=r"No files fi\.test\.txt"):
        LanguageFile.find("fi", "ner", "test", str(data))
    for treebank in ("ewt", "gum"):
        (tmp_path / f"en_{treebank}-ud-test.conllu.gz").touch()
    with pytest.raises(CtxError, match=r"2 files(.|\n)*en_gum-ud-test(.|\n)*en=FILE"):
        LanguageFile.find("en", "pos", "test", str(tmp_path))
    names = ["xnli.test.de.tsv", "xnli.dev.de.tsv", "stsb-fr-test.csv", "xquad.es.json", "tatoeba.en-it.tsv"]
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    for language, task, split, name in (
        ("de", "sequence-classification", "test", names[0]),
        ("de", "sequence-classification", "dev", names[1]),
        ("fr", "regression", "test", names[2]),
        ("es", "question-answering", "test", names[3]),
        ("it", "retrieval", "en", names[4]),
    ):
        assert LanguageFile.find(language, task, split, str(folder)).file == str(folder / name)
    with pytest.raises(CtxError, match=r"No files \*de\*en\*"):
        LanguageFile.find("de", "retrieval", "en", str(folder))


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("a.txt", ("", "a.txt")),
        ("de=a.txt", ("de", "a.txt")),
        ("de=/data/split=1/a.txt", ("de", "/data/split=1/a.txt")),
        ("/data/lang=de/a.txt", ("", "/data/lang=de/a.txt")),
    ],
)
def test_split_language(entry: str, expected: tuple[str, str]) -> None:
    assert split_language(entry) == expected


def test_frozen_encoder() -> None:
    """A frozen encoder has no dropout and no gradients in training mode; its pooler is trained."""
    model = Case(FAMILIES["bert"], "AutoModelForSequenceClassification").model(hidden_dropout_prob=0.5)
    freeze_encoder(model)
    model.train()
    assert model.training
    assert not any(module.training for module in model.base_model.modules())
    model(torch.tensor([[5, 6, 7]]), labels=torch.tensor([1])).loss.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert any("pooler" in name for name in trained)
    assert not any("layers" in name or "embeddings" in name for name in trained)
    tied = Case(FAMILIES["t5"], "AutoModelForSeq2SeqLM").model(tie_word_embeddings=True)
    for encoder in (model.base_model, tied):
        with pytest.raises(CtxError, match="no trainable weights outside its encoder"):
            freeze_encoder(encoder)
