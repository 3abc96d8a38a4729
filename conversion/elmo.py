r"""Convert released ELMo weights (AllenNLP's options.json and HDF5 file) to a model and its tokenizer.

python conversion/elmo.py --options options.json --weights weights.hdf5 --output runs/elmo
"""

from dataclasses import dataclass, field
from pathlib import Path

from hf_ctxmodels import CtxElmoTokenizer
from hf_ctxmodels.conversion.saving import check_output_free, save_converted_model
from hf_ctxmodels.core.errors import CtxError, run_script
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.models.elmo.conversion_elmo import read_allennlp
from hf_ctxmodels.training.recipe import parse_arguments


@dataclass
class ConversionArguments:
    """Arguments of the conversion."""

    options: str = field(metadata={"help": "The model's options.json."})
    weights: str = field(metadata={"help": "The model's HDF5 file."})
    output: str = field(metadata={"help": "Directory for the model and its tokenizer."})
    vocabulary: str | None = field(
        default=None,
        metadata={"help": "Output vocabulary of the language model, one word per line, most frequent first."},
    )
    overwrite: bool = flag(False, "Replace an existing model in --output.")


def read_vocabulary(file: str) -> list[str]:
    """Read the words of a file, without special tokens; raises CtxError if it cannot be read."""
    try:
        words = Path(file).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise CtxError(f"Cannot read the vocabulary: {error}.", location=file) from error
    return [word for word in words if word not in {*CtxElmoTokenizer.special_tokens, "<UNK>"}]


def main() -> None:
    """Convert, and print a summary."""
    (arguments,) = parse_arguments(ConversionArguments, description=__doc__)
    check_output_free(arguments.output, arguments.overwrite)
    words = [] if arguments.vocabulary is None else read_vocabulary(arguments.vocabulary)
    model = read_allennlp(arguments.options, arguments.weights)
    # the released models were trained on tokenized text
    tokenizer = CtxElmoTokenizer.from_words(
        words, split_punctuation=False, max_characters=model.config.max_characters_per_token
    )
    model.config.vocab_size = len(tokenizer)
    save_converted_model(model, tokenizer, arguments.output)
    number = sum(parameter.numel() for parameter in model.parameters())
    print(f"{number:,} parameters: {arguments.weights} -> {arguments.output}")


if __name__ == "__main__":
    run_script(main)
