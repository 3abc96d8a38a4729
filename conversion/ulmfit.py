r"""AWD-LSTM language model of fastai (.pth and its list of words) -> a model and its tokenizer.

python conversion/ulmfit.py --weights wt103-fwd/lstm_fwd.pth --vocabulary itos.json --output runs/ulmfit
"""

from dataclasses import dataclass, field

from hf_ctxmodels.conversion.saving import check_output_free, save_converted_model
from hf_ctxmodels.core.errors import CtxError, run_script
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.models.ulmfit.conversion_ulmfit import build_ulmfit_tokenizer, read_fastai, read_words
from hf_ctxmodels.training.recipe import parse_arguments


@dataclass
class ConversionArguments:
    """What is converted."""

    weights: str = field(metadata={"help": "Weights (.pth) of a language model or of its encoder."})
    vocabulary: str = field(metadata={"help": "Its words by their ids (itos): .json, .txt with one a line, or .pkl."})
    output: str = field(metadata={"help": "Directory for the model and its tokenizer."})
    overwrite: bool = flag(False, "Replace the model that --output holds.")
    allow_pickle: bool = flag(
        False, "Open a .pkl: a pickle can name any program to run, so know where it comes from. Lists of words alone."
    )


def main() -> None:
    """Convert, and say what."""
    (arguments,) = parse_arguments(ConversionArguments, description=__doc__)
    check_output_free(arguments.output, arguments.overwrite)
    words = read_words(arguments.vocabulary, arguments.allow_pickle)
    model = read_fastai(arguments.weights)
    if len(words) != model.config.vocab_size:
        raise CtxError(
            f"{len(words)} words for vectors of {model.config.vocab_size}.",
            location=arguments.vocabulary,
            hint="give the words and the weights of one model.",
        )
    tokenizer = build_ulmfit_tokenizer(words)
    model.config.pad_token_id, model.config.bos_token_id = tokenizer.pad_token_id, tokenizer.bos_token_id
    save_converted_model(model, tokenizer, arguments.output)
    print(f"{model.num_parameters():,} parameters: {arguments.weights} -> {arguments.output}")


if __name__ == "__main__":
    run_script(main)
