"""The parameters of GPT as they were published: `params_shapes.json` and `params_0.npy`, `params_1.npy`, ..."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.models.gpt.configuration_gpt import CtxGptConfig
from hf_ctxmodels.models.gpt.modeling_gpt import CtxGptForCausalLM
from hf_ctxmodels.models.gpt.tokenization_gpt import TASK_TOKENS, CtxGptTokenizer

# The parameters of a layer in the order of the files.
_LAYER = (
    "attention.qkv_proj.weight",
    "attention.qkv_proj.bias",
    "attention.out_proj.weight",
    "attention.out_proj.bias",
    "attention_norm.weight",
    "attention_norm.bias",
    "feed_forward.up_proj.weight",
    "feed_forward.up_proj.bias",
    "feed_forward.down_proj.weight",
    "feed_forward.down_proj.bias",
    "feed_forward_norm.weight",
    "feed_forward_norm.bias",
)
_HEAD_WIDTH = 64


class _Tables(NamedTuple):
    """(vocabulary, hidden) token rows and (positions, hidden) position rows."""

    words: Tensor
    positions: Tensor


def read_openai_checkpoint(
    folder: str | Path, vocabulary: str | Path, merges: str | Path, *, positions: int = 512, heads: int | None = None
) -> tuple[CtxGptForCausalLM, CtxGptTokenizer]:
    """The language model and its tokenizer.

    The released model has two tables, of positions and of tokens. A model that was fine-tuned by the released code has
    one table: tokens, the three tokens of tasks, and positions.

    Args:
        folder: With params_shapes.json and the .npy files, whose values one after another are all parameters.
        vocabulary, merges: encoder_bpe_40000.json and vocab_40000.bpe.
        positions: Position rows, where there is one table.
        heads: Attention heads, which no file tells; None for heads of width 64, as in the released model.

    Raises:
        CtxError: A file is missing or damaged, or they do not belong together.
    """
    tokenizer = CtxGptTokenizer(vocab=str(vocabulary), merges=str(merges))
    arrays = _arrays(Path(folder))
    first, layers = len(arrays) % len(_LAYER), len(arrays) // len(_LAYER)
    if first not in (1, 2) or not layers:
        raise CtxError(
            f"params_shapes.json lists {len(arrays)} parameters, expected one or two tables and {len(_LAYER)} for each "
            "layer.",
            location=str(folder),
            hint="give the parameters of a language model, without a classifier's.",
        )
    tables = _split(arrays[0], len(tokenizer), positions, str(folder)) if first == 1 else _Tables(arrays[1], arrays[0])
    new = len(tables.words) - len(tokenizer)
    if new == len(TASK_TOKENS):
        tokenizer.prepare_for_tasks()
    elif new:
        raise CtxError(
            f"{len(tables.words)} token rows for {len(tokenizer)} tokens.",
            location=str(vocabulary),
            hint="give the vocabulary of this model.",
        )
    width = tables.words.shape[1]
    config = CtxGptConfig(
        vocab_size=len(tables.words),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads or max(1, width // _HEAD_WIDTH),
        max_position_embeddings=len(tables.positions),
        pad_token_id=tokenizer.pad_token_id,
    )
    model = CtxGptForCausalLM(config)
    _load(model, _native(tables, arrays[first:]), str(folder))
    return model.eval(), tokenizer


def _arrays(folder: Path) -> list[Tensor]:
    """All parameters, in the shapes of the list; the kernels of convolutions of width 1 as (out, in)."""
    file = folder / "params_shapes.json"
    try:
        shapes = json.loads(file.read_text(encoding="utf-8"))
        sizes = [int(np.prod(shape)) for shape in shapes]
        count = len(list(folder.glob("params_*.npy")))
        values = np.concatenate([np.load(folder / f"params_{number}.npy").reshape(-1) for number in range(count)])
    except (OSError, ValueError, TypeError) as error:
        raise CtxError(
            f"The parameters cannot be read: {error}.",
            location=str(folder),
            hint="give the folder that has params_shapes.json, params_0.npy, params_1.npy, ...",
        ) from error
    if sum(sizes) != len(values):
        raise CtxError(
            f"params_shapes.json lists {sum(sizes):,} numbers, the {count} .npy files hold {len(values):,}.",
            location=str(folder),
            hint="copy all of them again.",
        )
    parts = torch.from_numpy(values.astype(np.float32)).split(sizes)
    tensors = [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]
    return [tensor[0].T.contiguous() if tensor.dim() == 3 else tensor.clone() for tensor in tensors]


def _split(table: Tensor, tokens: int, positions: int, folder: str) -> _Tables:
    """The parts of one table of tokens and positions."""
    words = len(table) - positions
    if words not in (tokens, tokens + len(TASK_TOKENS)):
        raise CtxError(
            f"The table has {len(table)} rows, expected {tokens} tokens, {len(TASK_TOKENS)} tokens of tasks or none, "
            f"and {positions} positions.",
            location=folder,
            hint="give the number of positions that this model was fine-tuned with.",
        )
    return _Tables(table[:words].clone(), table[words:].clone())


def _native(tables: _Tables, arrays: Sequence[Tensor]) -> dict[str, Tensor]:
    """Parameters by their names here."""
    named = {"gpt.word_embeddings.weight": tables.words, "gpt.position_embeddings.weight": tables.positions}
    for number, tensor in enumerate(arrays):
        layer, place = divmod(number, len(_LAYER))
        named[f"gpt.layers.{layer}.{_LAYER[place]}"] = tensor
    return named


def _load(model: CtxGptForCausalLM, named: Mapping[str, Tensor], folder: str) -> None:
    """Copy the parameters; raises CtxError for other shapes than the model's."""
    expected: dict[str, Any] = dict(model.named_parameters())
    for name, tensor in named.items():
        if expected[name].shape != tensor.shape:
            raise CtxError(
                f"{name} is {tuple(tensor.shape)}, expected {tuple(expected[name].shape)} in a GPT of width "
                f"{model.config.hidden_size}.",
                location=folder,
                hint="give the files of one model.",
            )
    with torch.no_grad():
        for name, tensor in named.items():
            expected[name].copy_(tensor)
