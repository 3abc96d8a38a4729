r"""Convert a TensorFlow checkpoint of Grover and GPT-2's vocabulary to a model and its tokenizer, without TensorFlow.

python conversion/grover.py --checkpoint models/base/model.ckpt --vocabulary sample/encoder.json \
    --merges sample/vocab.bpe --output runs/grover
"""

from dataclasses import dataclass, field

from hf_ctxmodels import CtxGroverTokenizer
from hf_ctxmodels.conversion.saving import check_output_free, save_converted_model
from hf_ctxmodels.conversion.tensorflow_files import TensorFlowCheckpoint
from hf_ctxmodels.core.errors import CtxError, run_script
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.models.grover.conversion_grover import read_grover_checkpoint
from hf_ctxmodels.training.recipe import parse_arguments


@dataclass
class ConversionArguments:
    """Arguments of the conversion."""

    checkpoint: str = field(
        metadata={"help": "Checkpoint without .index and .data-..., such as models/base/model.ckpt."}
    )
    vocabulary: str = field(metadata={"help": "encoder.json of Grover or GPT-2."})
    merges: str = field(metadata={"help": "vocab.bpe of Grover or GPT-2."})
    output: str = field(metadata={"help": "Directory for the model and its tokenizer."})
    overwrite: bool = flag(False, "Replace an existing model in --output.")


def main() -> None:
    """Convert, and print a summary."""
    (arguments,) = parse_arguments(ConversionArguments, description=__doc__)
    check_output_free(arguments.output, arguments.overwrite)
    model = read_grover_checkpoint(TensorFlowCheckpoint(arguments.checkpoint), arguments.checkpoint)
    tokenizer = CtxGroverTokenizer(
        vocab=arguments.vocabulary, merges=arguments.merges, model_max_length=model.config.max_position_embeddings
    )
    if len(tokenizer) != model.config.vocab_size:
        raise CtxError(
            f"{len(tokenizer)} tokens for {model.config.vocab_size} embeddings.",
            location=arguments.vocabulary,
            hint="give the vocabulary and the checkpoint of the same model.",
        )
    save_converted_model(model, tokenizer, arguments.output)
    print(f"{model.num_parameters():,} parameters: {arguments.checkpoint} -> {arguments.output}")


if __name__ == "__main__":
    run_script(main)
