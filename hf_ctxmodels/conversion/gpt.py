r"""Convert the released parameters of GPT (.npy files) and its vocabulary to a model and its tokenizer.

hf-ctxmodels convert gpt --folder finetune-transformer-lm/model --output runs/gpt
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hf_ctxmodels.conversion.released_files import Conversion, load_weights
from hf_ctxmodels.core.errors import CtxError, wrap_errors
from hf_ctxmodels.core.flags import REQUIRED, flag
from hf_ctxmodels.models.gpt.configuration_gpt import CtxGptConfig
from hf_ctxmodels.models.gpt.modeling_gpt import CtxGptForCausalLM
from hf_ctxmodels.models.gpt.tokenization_gpt import TASK_TOKENS, CtxGptTokenizer

# the parameters of a layer in the order of the files
_LAYER_PARAMETERS = [
    f"{module}.{suffix}"
    for module in (
        *("attention.qkv_proj", "attention.out_proj", "attention_norm"),
        *("feed_forward.up_proj", "feed_forward.down_proj", "feed_forward_norm"),
    )
    for suffix in ("weight", "bias")
]
_HEAD_DIM = 64


def read_openai_checkpoint(
    folder: str | Path, vocabulary: str | Path, merges: str | Path, *, positions: int = 512, heads: int | None = None
) -> tuple[CtxGptForCausalLM, CtxGptTokenizer]:
    """Read the language model and its tokenizer.

    The released model has two embedding matrices, of positions and of tokens. A model that was fine-tuned by the
    released code has a single one: the tokens, the three task tokens, and the positions.

    Args:
        folder: Directory with params_shapes.json and the .npy files, which hold the concatenated parameters.
        positions: Number of positions in a single embedding matrix.
        heads: Number of attention heads, which the files do not hold; None for heads of width 64, as released.
    """
    tokenizer = CtxGptTokenizer(vocab=str(vocabulary), merges=str(merges))
    parameters = _read_parameters(Path(folder))
    num_layers, num_embeddings = divmod(len(parameters), len(_LAYER_PARAMETERS))
    if num_embeddings not in (1, 2) or not num_layers:
        raise CtxError(
            f"params_shapes.json lists {len(parameters)} parameters, expected one or two embedding matrices and "
            f"{len(_LAYER_PARAMETERS)} per layer.",
            location=str(folder),
            hint="use the parameters of a language model, without a classifier.",
        )
    if num_embeddings == 1:
        words, position_rows = parameters[0].tensor_split([max(0, len(parameters[0]) - positions)])
        if len(words) - len(tokenizer) not in (0, len(TASK_TOKENS)):
            raise CtxError(
                f"The embedding matrix has {len(parameters[0])} rows, expected {len(tokenizer)} tokens, "
                f"{len(TASK_TOKENS)} or no task tokens, and {positions} positions.",
                location=str(folder),
                hint="use the number of positions that this model was fine-tuned with.",
            )
    else:
        position_rows, words = parameters[:2]
    num_new_tokens = len(words) - len(tokenizer)
    if num_new_tokens == len(TASK_TOKENS):
        tokenizer.prepare_for_tasks()
    elif num_new_tokens:
        raise CtxError(
            f"There are {len(words)} token embeddings for {len(tokenizer)} tokens.",
            location=str(vocabulary),
            hint="use the vocabulary of this model.",
        )
    width = words.shape[1]
    config = CtxGptConfig(
        vocab_size=len(words),
        hidden_size=width,
        num_hidden_layers=num_layers,
        num_attention_heads=heads or max(1, width // _HEAD_DIM),
        max_position_embeddings=len(position_rows),
        pad_token_id=tokenizer.pad_token_id,
    )
    model = CtxGptForCausalLM(config)
    weights = {"gpt.word_embeddings.weight": words, "gpt.position_embeddings.weight": position_rows}
    for number, tensor in enumerate(parameters[num_embeddings:]):
        layer, index = divmod(number, len(_LAYER_PARAMETERS))
        weights[f"gpt.layers.{layer}.{_LAYER_PARAMETERS[index]}"] = tensor
    return load_weights(model, weights, str(folder)), tokenizer


def _read_parameters(folder: Path) -> list[Tensor]:
    """All parameters with the listed shapes; the kernels of convolutions of width 1 as (out, in)."""
    hint = "use the directory with params_shapes.json, params_0.npy, params_1.npy, ..."
    with wrap_errors("The parameters cannot be read", location=str(folder), hint=hint):
        shapes = json.loads((folder / "params_shapes.json").read_text(encoding="utf-8"))
        sizes = [int(np.prod(shape)) for shape in shapes]
        count = len(list(folder.glob("params_*.npy")))
        arrays = [np.load(folder / f"params_{number}.npy").reshape(-1) for number in range(count)]
        values = np.concatenate(arrays, dtype=np.float32)  # not from text or complex numbers
    if sum(sizes) != len(values):
        raise CtxError(
            f"params_shapes.json lists {sum(sizes):,} values, the {count} .npy files hold {len(values):,}.",
            location=str(folder),
            hint="copy all files again.",
        )
    chunks = torch.from_numpy(values).split(sizes)
    tensors = [chunk.view(*shape) for chunk, shape in zip(chunks, shapes, strict=True)]
    return [tensor[0].T.contiguous() if tensor.dim() == 3 else tensor.clone() for tensor in tensors]


@dataclass(kw_only=True)
class GptConversion(Conversion):
    """Arguments of the conversion."""

    folder: str = flag(
        REQUIRED, "Folder with params_shapes.json, params_0.npy, ..., encoder_bpe_40000.json, vocab_40000.bpe."
    )
    vocabulary: str | None = flag(None, "Vocabulary; by default encoder_bpe_40000.json in --folder.")
    merges: str | None = flag(None, "Merges; by default vocab_40000.bpe in --folder.")
    positions: int = flag(512, "Number of positions at the end of a joint embedding matrix.")
    heads: int | None = flag(None, "Number of attention heads; by default the width divided by 64.")

    def convert(self) -> tuple[CtxGptForCausalLM, CtxGptTokenizer, str]:
        """The model, its tokenizer and the folder of the parameters."""
        vocabulary = self.vocabulary or Path(self.folder) / "encoder_bpe_40000.json"
        merges = self.merges or Path(self.folder) / "vocab_40000.bpe"
        checkpoint = read_openai_checkpoint(self.folder, vocabulary, merges, positions=self.positions, heads=self.heads)
        return *checkpoint, self.folder
