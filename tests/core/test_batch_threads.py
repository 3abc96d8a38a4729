"""`map_batches` computes batches in threads."""

from collections.abc import Iterator
from contextvars import ContextVar
from copy import deepcopy
from threading import Barrier, current_thread, main_thread

import pytest
import torch
from torch import Tensor, nn
from zoo import tiny_config

from hf_ctxmodels.core.batch_threads import map_batches, num_batch_threads
from hf_ctxmodels.core.model import CtxPreTrainedModel
from hf_ctxmodels.registry import FAMILIES

_NUM_THREADS = 3


@pytest.fixture
def threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(_NUM_THREADS)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def model() -> CtxPreTrainedModel:
    bert = FAMILIES["bert"]
    return bert.models["AutoModel"](tiny_config(bert))


@pytest.mark.usefixtures("threads")
def test_order_and_state_of_threads(model: CtxPreTrainedModel) -> None:
    """Batches run concurrently in evaluation mode, with context and autocast of the caller; results are in order."""
    variable: ContextVar[str] = ContextVar("variable", default="default")
    variable.set("caller")
    barrier = Barrier(_NUM_THREADS, timeout=60)

    def function(batch: int) -> tuple[int, Tensor]:
        barrier.wait()  # times out unless three threads run concurrently
        assert current_thread() is not main_thread()
        assert torch.get_num_threads() == 1
        assert not model.training
        assert not torch.is_grad_enabled()
        assert variable.get() == "caller"
        weight = model.get_input_embeddings().weight
        return batch, weight @ weight.T

    model.train()
    with torch.autocast("cpu", torch.bfloat16):
        results = map_batches(function, range(6), model)
    assert [batch for batch, _ in results] == list(range(6))
    assert all(product.dtype is torch.bfloat16 for _, product in results)
    assert model.training
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == _NUM_THREADS


@pytest.mark.usefixtures("threads")
def test_exception_stops_batches(model: CtxPreTrainedModel) -> None:
    """The exception is raised in the caller, and pending batches are not computed."""
    computed = []

    def function(batch: int) -> None:
        computed.append(batch)
        raise ValueError(f"batch {batch}")

    with pytest.raises(ValueError, match="batch 0"):
        map_batches(function, range(10_000), model)
    assert len(computed) < 10_000
    assert torch.get_num_threads() == _NUM_THREADS


@pytest.mark.usefixtures("threads")
def test_sequential_batches_of_unsupported_models(model: CtxPreTrainedModel) -> None:
    """Transformers models, models on a GPU and models with hooks compute batches sequentially."""
    assert num_batch_threads(model) == _NUM_THREADS
    assert num_batch_threads(deepcopy(model).to("meta")) == 1
    handle = model.get_input_embeddings().register_forward_hook(lambda module, args, output: None)
    assert num_batch_threads(model) == 1
    handle.remove()
    linear = nn.Linear(2, 2)
    assert num_batch_threads(linear) == 1
    assert map_batches(lambda batch: (batch, current_thread() is main_thread()), [1, 2], linear) == [
        (1, True),
        (2, True),
    ]
