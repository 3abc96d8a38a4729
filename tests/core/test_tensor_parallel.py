"""Tensor parallelism: two processes, which run `check_in_two_processes`, compute the results of a single process."""

import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import save, tiny_pair
from forked import ForkedProcess
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.distributed import DistributedConfig
from zoo import CASES, Case, assert_close, assert_same_gradients, gradients, labeled_batch, scalar_loss

from hf_ctxmodels import CtxError, prune_heads
from hf_ctxmodels.core.tensor_parallel import check_shardable

CLUSTER_PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "cluster.md"
CASE = {str(case): case for case in CASES}
BERT, GPT2, T5 = (
    CASE["bert-AutoModelForMaskedLM"],
    CASE["gpt2-AutoModelForCausalLM"],
    CASE["t5-AutoModelForSeq2SeqLM"],
)
# (case, configuration overrides, number of sharded weights of two layers or pairs of layers)
SHARDED: list[tuple[Case, dict[str, Any], int]] = [
    (BERT, {}, 2 * 8),
    (GPT2, {}, 2 * 8),
    (T5, {"feed_forward_proj": "gated-gelu"}, 2 * (5 + 8)),
    (CASE["bart-AutoModelForSeq2SeqLM"], {}, 2 * (8 + 14)),
    (CASE["albert-AutoModelForPreTraining"], {}, 8),  # the layers share their weights
    (CASE["xlnet-AutoModelForCausalLM"], {}, 2 * 4),  # feed-forward networks only
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("num_cases", [3, pytest.param(len(SHARDED), marks=pytest.mark.slow)])
def test_two_processes_equal_single_process(num_cases: int, tmp_path: Path) -> None:
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    processes = [
        ForkedProcess(__file__, tmp_path, num_cases, RANK=str(rank), LOCAL_RANK=str(rank), **address)
        for rank in range(2)
    ]
    outputs = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)[-6000:]


@pytest.mark.slow
def test_cluster_page_example(tmp_path: Path) -> None:
    section = CLUSTER_PAGE.read_text("utf-8").partition("## Tensor parallelism")[2]
    script, command = (re.search(rf"^```{language}\n(.*?)^```", section, re.S | re.M)[1] for language in ("py", "sh"))
    texts = ["translate English to German: The house is small.", "A cat sat on a mat."]
    save(tmp_path / "runs" / "t5", *tiny_pair("t5", "AutoModelForSeq2SeqLM", texts))
    (tmp_path / "sharded.py").write_text(script)
    arguments = command.split()
    assert arguments[0] == "torchrun"
    process = ForkedProcess("-m", "torch.distributed.run", *arguments[1:], cwd=tmp_path)
    _, errors = process.communicate()
    assert process.returncode == 0, errors[-6000:]
    before, after = (
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "runs" / name).state_dict() for name in ("t5", "t5-tuned")
    )
    assert {name for name in before if torch.equal(before[name], after[name])} == set()


def test_unshardable_models_raise() -> None:
    with pytest.raises(CtxError, match="no layers"):
        check_shardable(CASE["elmo-AutoModelForPreTraining"].model(), 2)
    modified = BERT.model()
    modified.bert.layers[1].attention.qkv_proj = nn.Sequential(modified.bert.layers[1].attention.qkv_proj)
    with pytest.raises(CtxError, match="Sequential") as error:
        check_shardable(modified, 2)
    assert error.value.location == "bert.layers.1.attention.qkv_proj"
    quantized = BERT.model()
    quantized.is_quantized = True
    with pytest.raises(CtxError, match="quantized"):
        check_shardable(quantized, 2)
    with pytest.raises(CtxError, match=r"47 features .* 2 processes") as error:
        check_shardable(BERT.model(intermediate_size=47), 2)
    assert error.value.location == "bert.layers.0.feed_forward.up_proj"


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def check_in_two_processes(folder: Path, num_cases: int) -> None:
    """Run the checks in one of two processes, which share a folder, with the first cases of `SHARDED`."""
    distributed.init_process_group("gloo")
    for number, (case, overrides, num_sharded) in enumerate(SHARDED[:num_cases]):
        check_same_as_unsharded(case, overrides, num_sharded, folder / str(number))
    for case in (GPT2, T5):
        check_same_tokens(case, folder / f"generate-{case.family.name}")
    for case in (BERT, T5):
        check_dropout(case, folder / f"dropout-{case.family.name}")
    check_errors(folder)
    distributed.destroy_process_group()


def load_sharded(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Save a model in the first process and load it sharded."""
    if distributed.get_rank() == 0:
        model.save_pretrained(folder)
    distributed.barrier()
    return type(model).from_pretrained(folder, distributed_config=DistributedConfig(tp_plan="auto"))


def check_same_as_unsharded(case: Case, overrides: dict[str, Any], num_sharded: int, folder: Path) -> None:
    model, batch = case.model(num_hidden_layers=2, **overrides), labeled_batch(case)
    sharded = load_sharded(model, folder)
    weights = dict(sharded.named_parameters())
    assert sum(isinstance(weight, DTensor) for weight in weights.values()) == num_sharded, str(case)
    expected_loss = scalar_loss(case, model, batch)
    with torch.no_grad():
        assert_close(scalar_loss(case, sharded, batch), expected_loss, f"{case} without gradients")
    for _ in range(2):  # two micro-batches
        loss = scalar_loss(case, sharded, batch)
        assert_close(loss, expected_loss, str(case))
        (loss / 2).backward()
    expected = gradients(model, expected_loss)
    grads = {name: expected[name] * 0 if weight.grad is None else weight.grad for name, weight in weights.items()}
    full_gradients = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}
    assert_same_gradients(full_gradients, expected, where=str(case))
    sharded.save_pretrained(folder / "saved")
    assert_close(type(model).from_pretrained(folder / "saved").state_dict(), model.state_dict(), str(case), tolerance=0)


def check_same_tokens(case: Case, folder: Path) -> None:
    model = case.model(num_hidden_layers=2)
    sharded = load_sharded(model, folder)
    ids = torch.tensor([[7, 8, 9, 10], [11, 12, 13, 14]])
    for options in ({}, {"num_beams": 3}, {"cache_implementation": "static"}):
        options = {"max_new_tokens": 5, "do_sample": False, **options}
        assert torch.equal(sharded.generate(ids, **options), model.generate(ids, **options)), f"{case} {options}"
    with torch.no_grad():
        expected = model(**labeled_batch(case)).loss
        assert_close(sharded.prepare_for_inference()(**labeled_batch(case)).loss, expected, f"{case} prepared")


def check_dropout(case: Case, folder: Path) -> None:
    """With dropout and the same seed, all processes have equal losses and equal gradients of replicated weights."""
    rates = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3}
    fields = {name: value for name, value in rates.items() if hasattr(case.family.config(), name)}
    overrides = fields or {"dropout_rate": 0.3}
    sharded = load_sharded(case.model(num_hidden_layers=2, **overrides), folder).train()
    torch.manual_seed(0)
    loss = scalar_loss(case, sharded, labeled_batch(case))
    loss.backward()
    assert not torch.equal(loss, scalar_loss(case, sharded.eval(), labeled_batch(case)))
    replicated = [weight.grad for weight in sharded.parameters() if not isinstance(weight, DTensor)]
    values = torch.stack([loss.detach(), *(grad.double().sum().float() for grad in replicated if grad is not None)])
    first_rank_values = values.clone()
    distributed.broadcast(first_rank_values, src=0)
    assert_close(values, first_rank_values, f"{case} with dropout")


def check_errors(folder: Path) -> None:
    with pytest.raises(CtxError, match=r"3 attention heads .* 2 processes"):
        load_sharded(BERT.model(num_attention_heads=3, hidden_size=24), folder / "heads")
    pruned = BERT.model()
    prune_heads(pruned, {0: [1, 2]})
    with pytest.raises(CtxError, match="pruned"):
        load_sharded(pruned, folder / "pruned")
    for case in (BERT, GPT2, T5):
        if distributed.get_rank() == 0:
            case.model().export_reference(folder / str(case))
        distributed.barrier()
        with pytest.raises(CtxError, match="layout of this package"):
            case.model_class.from_pretrained(folder / str(case), distributed_config=DistributedConfig(tp_plan="auto"))
    sharded = load_sharded(BERT.model(), folder / "errors")
    with pytest.raises(CtxError, match="PEFT"):
        sharded.peft_config = {}
    with pytest.raises(CtxError, match="divided among processes"):
        prune_heads(sharded, {0: [1]})
    with pytest.raises(CtxError, match="gather a sharded model"):
        sharded.export_reference(folder / "reference")


if __name__ == "__main__":
    check_in_two_processes(Path(sys.argv[1]), int(sys.argv[2]))
