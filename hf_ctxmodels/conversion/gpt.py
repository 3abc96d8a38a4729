r"""Convert the released parameters of GPT (.npy files) and its vocabulary to a model and its tokenizer.

python -m hf_ctxmodels.conversion.gpt --folder finetune-transformer-lm/model --output runs/gpt
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_ctxmodels.conversion.saving import check_output_free, save_converted_model
from hf_ctxmodels.core.errors import CtxError, run_script
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.models.gpt.configuration_gpt import CtxGptConfig
from hf_ctxmodels.models.gpt.modeling_gpt import CtxGptForCausalLM
from hf_ctxmodels.models.gpt.tokenization_gpt import TASK_TOKENS, CtxGptTokenizer
from hf_ctxmodels.training.recipe import parse_arguments

# the parameters of a layer in the order of the files
_LAYER_PARAMETERS = (
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
_HEAD_DIM = 64


def read_openai_checkpoint(
    folder: str | Path, vocabulary: str | Path, merges: str | Path, *, positions: int = 512, heads: int | None = None
) -> tuple[CtxGptForCausalLM, CtxGptTokenizer]:
    """Read the language model and its tokenizer.

    The released model has two embedding matrices, of positions and of tokens. A model that was fine-tuned by the
    released code has a single one: the tokens, the three task tokens, and the positions.

    Args:
        folder: Directory with params_shapes.json and the .npy files, which hold the concatenated parameters.
        vocabulary, merges: The files encoder_bpe_40000.json and vocab_40000.bpe.
        positions: Number of positions in a single embedding matrix.
        heads: Number of attention heads, which the files do not hold; None for heads of width 64, as released.

    Raises:
        CtxError: A file is missing or damaged, or the files do not match each other.
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
        words, position_rows = _split_embeddings(parameters[0], len(tokenizer), positions, str(folder))
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
    embeddings = {"gpt.word_embeddings.weight": words, "gpt.position_embeddings.weight": position_rows}
    _load(model, embeddings | _name_layers(parameters[num_embeddings:]), str(folder))
    return model.eval(), tokenizer


def _read_parameters(folder: Path) -> list[Tensor]:
    """All parameters with the listed shapes; the kernels of convolutions of width 1 as (out, in)."""
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
            hint="use the directory with params_shapes.json, params_0.npy, params_1.npy, ...",
        ) from error
    if sum(sizes) != len(values):
        raise CtxError(
            f"params_shapes.json lists {sum(sizes):,} values, the {count} .npy files hold {len(values):,}.",
            location=str(folder),
            hint="copy all files again.",
        )
    chunks = torch.from_numpy(values.astype(np.float32)).split(sizes)
    tensors = [chunk.view(*shape) for chunk, shape in zip(chunks, shapes, strict=True)]
    return [tensor[0].T.contiguous() if tensor.dim() == 3 else tensor.clone() for tensor in tensors]


def _split_embeddings(embeddings: Tensor, num_tokens: int, num_positions: int, folder: str) -> tuple[Tensor, Tensor]:
    """Token and position embeddings of a single matrix."""
    num_words = len(embeddings) - num_positions
    if num_words not in (num_tokens, num_tokens + len(TASK_TOKENS)):
        raise CtxError(
            f"The embedding matrix has {len(embeddings)} rows, expected {num_tokens} tokens, {len(TASK_TOKENS)} or no "
            f"task tokens, and {num_positions} positions.",
            location=folder,
            hint="use the number of positions that this model was fine-tuned with.",
        )
    return embeddings[:num_words].clone(), embeddings[num_words:].clone()


def _name_layers(parameters: Sequence[Tensor]) -> dict[str, Tensor]:
    """Native name -> parameter of the layers."""
    named = {}
    for number, tensor in enumerate(parameters):
        layer, index = divmod(number, len(_LAYER_PARAMETERS))
        named[f"gpt.layers.{layer}.{_LAYER_PARAMETERS[index]}"] = tensor
    return named


def _load(model: CtxGptForCausalLM, state_dict: Mapping[str, Tensor], folder: str) -> None:
    """Copy the parameters; raises CtxError if a shape does not match the model."""
    parameters: dict[str, Any] = dict(model.named_parameters())
    for name, tensor in state_dict.items():
        if parameters[name].shape != tensor.shape:
            raise CtxError(
                f"{name} is {tuple(tensor.shape)}, expected {tuple(parameters[name].shape)} in a GPT of width "
                f"{model.config.hidden_size}.",
                location=folder,
                hint="use the files of one model.",
            )
    with torch.no_grad():
        for name, tensor in state_dict.items():
            parameters[name].copy_(tensor)


@dataclass
class ConversionArguments:
    """Arguments of the conversion."""

    folder: str = field(
        metadata={"help": "Folder with params_shapes.json, params_0.npy, ..., encoder_bpe_40000.json, vocab_40000.bpe."}
    )
    output: str = field(metadata={"help": "Directory for the model and its tokenizer."})
    vocabulary: str | None = flag(None, "Vocabulary; by default encoder_bpe_40000.json in --folder.")
    merges: str | None = flag(None, "Merges; by default vocab_40000.bpe in --folder.")
    positions: int = flag(512, "Number of positions at the end of a joint embedding matrix.")
    heads: int | None = flag(None, "Number of attention heads; by default the width divided by 64.")
    overwrite: bool = flag(False, "Replace an existing model in --output.")


def main() -> None:
    """Convert, and print a summary."""
    (arguments,) = parse_arguments(ConversionArguments, description=__doc__)
    check_output_free(arguments.output, arguments.overwrite)
    folder = Path(arguments.folder)
    model, tokenizer = read_openai_checkpoint(
        folder,
        arguments.vocabulary or folder / "encoder_bpe_40000.json",
        arguments.merges or folder / "vocab_40000.bpe",
        positions=arguments.positions,
        heads=arguments.heads,
    )
    save_converted_model(model, tokenizer, arguments.output)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer):,} tokens: {folder} -> {arguments.output}")


if __name__ == "__main__":
    run_script(main)
