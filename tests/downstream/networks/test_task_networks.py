"""Task networks: saving, loading, training and evaluation."""

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import command_output, run_command
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    Trainer,
    TrainingArguments,
)
from zoo import tiny_config

from hf_ctxmodels import CtxError, CtxTaskNetworkConfig, WordEncoder
from hf_ctxmodels.downstream.networks.creation import new_network, parse_features
from hf_ctxmodels.downstream.networks.features import embed_words
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.model_loading import new_model

TEXTS = ["the cat saw a small garden", "nobody", "a dog carried seven letters over the bridge", "the old sailor"]
CLOSE = {"atol": 1e-5, "rtol": 1e-4}
SMALL: dict[str, Any] = {"network_options": {"hidden_size": 8}, "feature_dropout": 0.1}

OPTIONS = ["network=esim", 'network_options={"hidden_size": 16, "dropout": 0}', "feature_dropout=0"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of a tiny BERT, GloVe and T5."""
    folders = {}
    for name in ("bert", "glove", "t5"):
        family = FAMILIES[name]
        tokenizer = family.tokenizer.train(TEXTS * 5, vocab_size=300)
        torch.manual_seed(len(name))
        folders[name] = str(tmp_path_factory.mktemp(name))
        for component in (family.models["AutoModel"](tiny_config(family, vocab_size=len(tokenizer))), tokenizer):
            component.save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text pairs; the label is 1 if the second text contains "cat"."""
    file = tmp_path_factory.mktemp("data") / "pairs.tsv"
    lines = [f"{TEXTS[n % 4]}\tthe {'cat' if n % 2 else 'dog'} number {n}\t{n % 2}" for n in range(24)]
    file.write_text("first\tsecond\tlabel\n" + "\n".join(lines) + "\n")
    return file


def make_network(sources: dict[str, str], auto_class: str, names: tuple[str, ...], **changes: Any) -> tuple[Any, Any]:
    config, tokenizer = new_network({name: sources[name] for name in names}, {**SMALL, **changes})
    torch.manual_seed(0)
    return new_model(auto_class, config), tokenizer


@torch.no_grad()
def test_vectors_equal_embedded_words(sources: dict[str, str], tmp_path: Path) -> None:
    """For single texts and pairs, on either padding side, and after saving."""
    model, tokenizer = make_network(sources, "AutoModel", ("glove", "t5"))
    texts = [TEXTS[0], "Zürich don't 🤖"]
    expected = embed_words(texts, [sources["glove"], sources["t5"]], layers="mix", device="cpu")
    expected += embed_words([text.split() for text in texts], [sources["glove"], sources["t5"]], layers="mix")
    for side in ("right", "left"):
        tokenizer.padding_side = side
        batch = tokenizer([text.split() for text in texts], padding=True, is_split_into_words=True, return_tensors="pt")
        states = model.eval()(**batch).last_hidden_state
        for row, sentence in enumerate(expected[2:]):
            is_word = batch["attention_mask"][row].bool()
            torch.testing.assert_close(states[row, is_word], sentence.vectors, **CLOSE)
            assert not states[row, ~is_word].any()
    tokenizer.padding_side = "right"
    pair = model(**tokenizer(TEXTS[0], TEXTS[3], return_tensors="pt")).last_hidden_state[0]
    single_texts = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in (TEXTS[0], TEXTS[3])]
    torch.testing.assert_close(pair, torch.cat(single_texts), **CLOSE)
    for component in (model, tokenizer):
        component.save_pretrained(tmp_path)
    reopened, reopened_tokenizer = AutoModel.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    batch = reopened_tokenizer(TEXTS[0], TEXTS[3], return_tensors="pt")
    torch.testing.assert_close(reopened(**batch).last_hidden_state[0], pair)
    assert not any(parameter.requires_grad for parameter in reopened.stack.encoders.parameters())
    embedded = model(inputs_embeds=pair[None]).last_hidden_state
    assert torch.equal(embedded[0], pair)


@torch.no_grad()
def test_models_in_any_order_are_saved(sources: dict[str, str], tmp_path: Path) -> None:
    """The keys of a saved configuration are sorted, but the weights of the models are numbered."""
    model, tokenizer = make_network(sources, "AutoModel", ("t5", "glove", "bert"))
    for component in (model, tokenizer):
        component.save_pretrained(tmp_path)
    reopened, reopened_tokenizer = AutoModel.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert reopened.stack.names == model.stack.names
    expected = model.eval()(**tokenizer(TEXTS[0], return_tensors="pt")).last_hidden_state
    states = reopened(**reopened_tokenizer(TEXTS[0], return_tensors="pt")).last_hidden_state
    torch.testing.assert_close(states, expected)


@torch.no_grad()
@pytest.mark.parametrize("limit", [1 << 20, 5_000, 0])
def test_cached_vectors(sources: dict[str, str], monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """`cache_vectors` computes each sentence once per frozen model, up to the memory limit."""
    model, tokenizer = make_network(sources, "AutoModel", ("bert", "glove"), trainable_encoders=["glove"])
    model.eval().stack._free_bytes = limit
    batches = [tokenizer(*pair, return_tensors="pt") for pair in zip(TEXTS, TEXTS[::-1], strict=True)]
    expected = [model(**batch).last_hidden_state for batch in batches]
    model.stack.clear_cache()
    model.stack._free_bytes = limit

    sizes = []
    original = WordEncoder.hidden_states
    monkeypatch.setattr(WordEncoder, "hidden_states", lambda *args: sizes.append(len(args[1])) or original(*args))
    model.cache_vectors(iter(batches))
    assert sizes == [len(TEXTS)]
    sizes.clear()
    for batch, vectors in zip(batches, expected, strict=True):
        torch.testing.assert_close(model(**batch).last_hidden_state, vectors, **CLOSE)
    bert_sentences = sum(sizes) - 2 * len(TEXTS)  # glove is trainable and computes both texts of each pair
    num_cached = len(model.stack._models[0].cached_vectors)
    assert num_cached == {1 << 20: len(TEXTS), 0: 0}.get(limit, num_cached)
    assert not model.stack._models[1].cached_vectors
    assert bert_sentences == 2 * (len(TEXTS) - num_cached)
    if limit == 5_000:
        assert 0 < num_cached < len(TEXTS)


def test_vectors_of_trained_models_are_not_cached(sources: dict[str, str]) -> None:
    model, tokenizer = make_network(sources, "AutoModel", ("bert",), trainable_encoders=["bert"])
    batches = iter([tokenizer(TEXTS[0], return_tensors="pt")])
    model.cache_vectors(batches)
    assert len(list(batches)) == 1  # not read


@pytest.mark.parametrize("name", ["biattentive", "esim", "decomposable_attention", "sentence"])
def test_classification_networks(sources: dict[str, str], name: str) -> None:
    """Frozen encoders have no gradients, and padding does not change the logits."""
    options = {"network": name, "trainable_encoders": ["bert"], "output_features": name in ("esim", "sentence")}
    model, tokenizer = make_network(
        sources, "AutoModelForSequenceClassification", ("bert", "glove"), mix_decay=0.1, num_labels=3, **options
    )
    pairs = [] if name == "sentence" else [TEXTS[::-1]]
    batch = tokenizer(TEXTS, *pairs, padding=True, return_tensors="pt")
    output = model.train()(**batch, labels=torch.tensor([0, 1, 2, 1]))
    output.loss.backward()
    bert, glove = model.features.stack.encoders
    assert bert.embeddings.word_embeddings.weight.grad.any()
    assert all(parameter.grad is None for parameter in glove.parameters())
    assert all(parameter.grad.any() for key, parameter in model.network.named_parameters() if key.endswith("weight"))
    logits = model.eval()(**batch).logits
    for row, text in enumerate(TEXTS):
        single = model(**tokenizer(text, *(TEXTS[-1 - row],) * len(pairs), return_tensors="pt")).logits
        torch.testing.assert_close(single[0], logits[row], **CLOSE)


@pytest.mark.slow
def test_finetune_pairs(sources: dict[str, str], table: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A pair classifier on two encoders learns, resumes exactly, predicts, and is published without unrelated files."""
    features = ",".join(f"{name}={sources[name]}" for name in ("bert", "glove"))
    flags = {
        "features": features, "config_options": OPTIONS,
        "train_file": table, "validation_file": table, "text_columns": "first,second", "label_column": "label",
        "learning_rate": 0.02, "per_device_batch_size": 8, "max_steps": 24, "save_steps": 12,
    }  # fmt: skip
    assert run_command("finetune", "sequence-classification", **flags, output_dir=tmp_path / "run") == 0
    output = capsys.readouterr().out
    assert "features.stack.mixes.0, share of each layer" in output
    summary = json.loads((tmp_path / "run" / "training_summary.json").read_text())
    assert summary["metrics"]["eval_accuracy"] > 0.9
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run")
    assert {model.config.id2label[0], model.config.id2label[1]} == {"0", "1"}

    resumed_flags = {**flags, "output_dir": tmp_path / "stopped"}
    weights = load_file(tmp_path / "run" / "model.safetensors")
    shutil.copytree(tmp_path / "run" / "checkpoint-12", tmp_path / "stopped" / "checkpoint-12")
    assert run_command("finetune", "sequence-classification", "--resume", **resumed_flags) == 0, capsys.readouterr().err
    resumed_weights = load_file(tmp_path / "stopped" / "model.safetensors")
    assert [key for key, weight in weights.items() if not torch.equal(weight, resumed_weights[key])] == []

    predictions = tmp_path / "predictions.jsonl"
    command_output("predict", model=tmp_path / "run", input=table, text_columns="first,second", output=predictions)
    predicted = [json.loads(line) for line in predictions.read_text().splitlines()]
    assert len(predicted) == 24
    (tmp_path / "run" / "features" / "notes.json").write_text("{}")
    command_output("push", model=tmp_path / "run", repo_id="org/net", output_dir=tmp_path / "repository")
    published = {str(file.relative_to(tmp_path / "repository")) for file in (tmp_path / "repository").rglob("*.json")}
    assert {"features/bert/tokenizer.json", "features/glove/tokenizer.json"} <= published
    assert "features/notes.json" not in published
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "repository")


def test_finetune_tagger(sources: dict[str, str], tmp_path: Path) -> None:
    """A tagger with a conditional random field learns BIO tags and predicts valid sequences only."""
    lines = [
        "".join(f"{word} {tag}\n" for word, tag in zip(words.split(), tags.split(), strict=True))
        for words, tags in (
            ("the cat saw a small garden", "O B-A I-A O O B-B"),
            ("a dog carried seven letters", "O B-A I-A O B-B"),
        )
    ]
    (tmp_path / "tags.conll").write_text("\n".join(lines * 4))
    command_output(
        "finetune token-classification",
        features=f"bert={sources['bert']}",
        config_options=['network_options={"hidden_size": 16, "dropout": 0}', "feature_dropout=0"],
        train_file=tmp_path / "tags.conll",
        validation_file=tmp_path / "tags.conll",
        learning_rate=0.03,
        per_device_batch_size=8,
        max_steps=25,
        output_dir=tmp_path / "run",
    )
    summary = json.loads((tmp_path / "run" / "training_summary.json").read_text())
    assert summary["metrics"]["eval_f1"] > 0.9
    model, tokenizer = (
        auto.from_pretrained(tmp_path / "run") for auto in (AutoModelForTokenClassification, AutoTokenizer)
    )
    batch = tokenizer([TEXTS[0].split(), ["cat"]], is_split_into_words=True, padding=True, return_tensors="pt")
    model.network.classifier.weight.data.mul_(-1)  # wrong scores, but labels must be valid
    labels = [model.config.id2label[index] for index in model(**batch).logits[0].argmax(-1).tolist()]
    assert all(tag[0] != "I" or previous[1:] == tag[1:] for previous, tag in pairwise(["O", *labels]))


@pytest.mark.parametrize("options", [{"highway": True}, {"crf": False, "variational_dropout": True}])
def test_tagger_with_trainer(sources: dict[str, str], tmp_path: Path, options: dict[str, Any]) -> None:
    """One Trainer step is equal for one batch and for micro-batches with different numbers of targets."""
    options = {"hidden_size": 8, "num_layers": 2, "dropout": 0.0, **options}
    changes = {"network_options": options, "feature_dropout": 0.0, "id2label": {0: "O", 1: "B-A", 2: "I-A"}}
    weights = []
    for accumulation in (1, 4):
        model, tokenizer = make_network(sources, "AutoModelForTokenClassification", ("bert",), **changes)
        features = [{**tokenizer(text), "labels": [n % 3 for n in range(len(text.split()))]} for text in TEXTS]
        arguments = TrainingArguments(
            str(tmp_path), max_steps=1, optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", report_to=[],
            gradient_accumulation_steps=accumulation, per_device_train_batch_size=4 // accumulation, max_grad_norm=0.0,
            save_strategy="no", use_cpu=True,
        )  # fmt: skip
        collator = DataCollatorForTokenClassification(tokenizer)
        Trainer(model, arguments, train_dataset=features, data_collator=collator).train()
        model.save_pretrained(tmp_path / "model")
        reopened = AutoModelForTokenClassification.from_pretrained(tmp_path / "model")
        batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
        torch.testing.assert_close(model.eval()(**batch).logits, reopened(**batch).logits, **CLOSE)
        weights.append(model.network.state_dict())
    initial = make_network(sources, "AutoModelForTokenClassification", ("bert",), **changes)[0].network.state_dict()
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, **CLOSE)
        assert not torch.equal(initial[name], weight), f"{name} is not trained"


@pytest.mark.parametrize("no_answer", [False, True])
def test_answer_span_loss(sources: dict[str, str], no_answer: bool) -> None:
    """Cross-entropy over all spans of the context and, with `no_answer`, the first word for no answer."""
    model, tokenizer = make_network(
        sources, "AutoModelForQuestionAnswering", ("glove",), network_options={"hidden_size": 8, "no_answer": no_answer}
    )
    model.eval()
    questions, contexts = ["who saw", "what did a dog carry"], [TEXTS[0], TEXTS[2]]
    starts, ends = torch.tensor([3, 0]), torch.tensor([4, 0])
    batch = tokenizer(questions, contexts, padding=True, return_tensors="pt")
    output = model(**batch, start_positions=starts, end_positions=ends)
    losses = []
    for row, (question, context) in enumerate(zip(questions, contexts, strict=True)):
        single = model(**tokenizer(question, context, return_tensors="pt"))
        length, first = len((question + " " + context).split()), len(question.split())
        for name in ("start_logits", "end_logits"):
            torch.testing.assert_close(output[name][row, :length], single[name][0], **CLOSE)
        spans = [(i, j) for i in range(first, length) for j in range(first, length)] + [(0, 0)] * no_answer
        scores = torch.stack([single.start_logits[0, i] + single.end_logits[0, j] for i, j in spans])
        if (target := (int(starts[row]), int(ends[row]))) in spans:
            losses.append(-scores.log_softmax(0)[spans.index(target)])
    assert len(losses) == 1 + no_answer
    torch.testing.assert_close(output.loss, torch.stack(losses).mean())
    with pytest.raises(CtxError, match="needs token_type_ids"):
        model(batch["input_ids"])


def test_training_loss_includes_mix_penalty(sources: dict[str, str]) -> None:
    """A shift of all mix weights changes only the penalty."""
    changes = {"network_options": {"hidden_size": 8, "dropout": 0.0}, "feature_dropout": 0.0, "mix_decay": 0.5}
    model, tokenizer = make_network(sources, "AutoModelForQuestionAnswering", ("bert",), **changes)
    batch = tokenizer(["who saw"], [TEXTS[0]], return_tensors="pt")
    targets = {"start_positions": torch.tensor([3]), "end_positions": torch.tensor([4])}
    loss = model.train()(**batch, **targets).loss
    mix = model.features.stack.mixes[0]
    mix.weights.data.add_(2)  # keeps the softmax of the weights
    torch.testing.assert_close(model(**batch, **targets).loss - loss, 0.5 * mix.distance())


def test_unsaved_heads_are_initialized(sources: dict[str, str], tmp_path: Path) -> None:
    model, tokenizer = make_network(sources, "AutoModelForTokenClassification", ("glove",))
    for component in (model, tokenizer):
        component.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.network_options = {"hidden_size": 8}
    qa_model = AutoModelForQuestionAnswering.from_pretrained(tmp_path, config=config)
    assert qa_model.network.no_alignment.item() == -1
    config.network, config.network_options = "decomposable_attention", {"hidden_size": 8, "intra_attention": True}
    pair_model = AutoModelForSequenceClassification.from_pretrained(tmp_path, config=config)
    assert not pair_model.network.distance_bias.any()


def test_bfloat16(sources: dict[str, str], tmp_path: Path) -> None:
    model, tokenizer = make_network(sources, "AutoModelForSequenceClassification", ("bert",), network="esim")
    for component in (model, tokenizer):
        component.save_pretrained(tmp_path)
    reloaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.bfloat16)
    batch = tokenizer(TEXTS[:2], TEXTS[2:], padding=True, return_tensors="pt")
    torch.testing.assert_close(reloaded(**batch).logits.float(), model.eval()(**batch).logits, atol=3e-2, rtol=5e-2)


@pytest.mark.parametrize("source", ["features", "family"])
def test_task_without_network_raises(sources: dict[str, str], tmp_path: Path, source: str) -> None:
    folder = sources["glove"]
    value = {"features": f"a={folder}", "family": f"glove:tokenizer={folder}"}[source]
    (tmp_path / "a.tsv").write_text("query\tcandidate\tlabel\nwho\ta cat\t1\nwho\ta dog\t0\n")
    files = dict.fromkeys(("train_file", "validation_file"), tmp_path / "a.tsv")
    error = command_output("finetune ranking", fails=True, **{source: value}, **files, output_dir=tmp_path / "run")
    assert "CtxError" in error
    assert "no head for" in error
    assert f"--{source}" in error


def test_invalid_options_raise(sources: dict[str, str]) -> None:
    for features in ("bert", "a=x,a=y", "=x"):
        with pytest.raises(CtxError, match="NAME=DIR"):
            parse_features([features])
    head = "AutoModelForSequenceClassification"
    with pytest.raises(CtxError, match="no network 'crf'"):
        make_network(sources, head, ("glove",), network="crf")
    with pytest.raises(CtxError, match="no option 'size'"):
        make_network(sources, head, ("glove",), network_options={"size": 3})
    for name in ("biattentive", "decomposable_attention"):
        with pytest.raises(CtxError, match="no states that output vectors"):
            make_network(sources, head, ("glove",), network=name, output_features=True)
    with pytest.raises(CtxError, match="no model 'elmo'"):
        make_network(sources, head, ("glove",), trainable_encoders=["elmo"])
    with pytest.raises(CtxError, match="not a valid name"):
        CtxTaskNetworkConfig(encoders={"a.b": {}})
    model, tokenizer = make_network(sources, "AutoModel", ("glove",))
    with pytest.raises(CtxError, match="exactly one of input_ids and inputs_embeds"):
        model()
    model.stack._models[0].encoder = None
    with pytest.raises(CtxError, match="no tokenizers"):
        model(**tokenizer("a cat", return_tensors="pt"))
