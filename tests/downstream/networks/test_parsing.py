"""Dependency parsers on features of tiny models: padding, accumulation, saving, trained encoders."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer
from treebank_files import write_treebank
from zoo import tiny_config

from hf_ctxmodels import AutoModelForDependencyParsing, CtxError, CtxTaskNetworkForDependencyParsing
from hf_ctxmodels.downstream.networks.creation import new_network
from hf_ctxmodels.downstream.tasks import TASKS, TaskArguments
from hf_ctxmodels.inference.task_heads import run_head
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.model_loading import new_model

OPTIONS = {"hidden_size": 8, "scorer_size": 6, "dropout": 0}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    family, folder = FAMILIES["bert"], tmp_path_factory.mktemp("bert")
    tokenizer = family.tokenizer.train(["old small dogs see sailors carry cats find letters ."] * 9, vocab_size=90)
    torch.manual_seed(0)
    for component in (family.models["AutoModel"](tiny_config(family, vocab_size=len(tokenizer))), tokenizer):
        component.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("num_layers", [0, 1])
def test_batches_equal_single_sentences(bert: str, tmp_path: Path, num_layers: int) -> None:
    """For both padding sides; losses and gradients of micro-batches sum to the loss of the batch."""
    task = TASKS["dependency-parsing"](TaskArguments())
    examples = task.read_file(str(write_treebank(tmp_path / "a.conllu", 6, 0)))
    changes = {"network_options": {**OPTIONS, "num_layers": num_layers}, "trainable_encoders": ["bert"]}
    config, tokenizer = new_network({"bert": bert}, changes)
    task.configure(config, examples, examples)
    torch.manual_seed(0)
    model = new_model("AutoModelForDependencyParsing", config).eval()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    model = AutoModelForDependencyParsing.from_pretrained(tmp_path / "model").eval()
    assert isinstance(model, CtxTaskNetworkForDependencyParsing)
    task.load_labels(model.config)
    for side in ("right", "left"):
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model", padding_side=side)
        encoded, collate = task.encode(examples, tokenizer), task.collator(tokenizer)
        single, batched = (run_head(model, tokenizer, task, encoded, batch_size) for batch_size in (1, 6))
        assert task.decode(examples, encoded, single) == task.decode(examples, encoded, batched)
        batch = collate(encoded.features)
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        name = "embeddings.word_embeddings.weight"
        encoder_weight = model.features.stack.encoders[0].get_parameter(name)
        gradients = [encoder_weight.grad.clone(), model.network.scorer.shared_weight.weight.grad.clone()]
        assert all(gradient.any() for gradient in gradients)
        model.zero_grad()
        number, total = int((batch["labels"] != -100).sum()), 0.0
        for feature in encoded.features:
            part = model(**collate([feature]), num_items_in_batch=number).loss
            part.backward()
            total += part.detach()
        torch.testing.assert_close(total, loss.detach(), rtol=1e-4, atol=1e-5)
        accumulated = [encoder_weight.grad, model.network.scorer.shared_weight.weight.grad]
        torch.testing.assert_close(accumulated, gradients, rtol=1e-3, atol=1e-6)


def test_output_features_raise(bert: str) -> None:
    config, _ = new_network({"bert": bert}, {"output_features": True})
    with pytest.raises(CtxError, match="does not read vectors before its output"):
        new_model("AutoModelForDependencyParsing", config)
