r"""Convert an AWD-LSTM language model of fastai (.pth and its list of words) to a model and its tokenizer.

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
    """Arguments of the conversion."""

    weights: str = field(metadata={"help": "Weights (.pth) of a language model or of its encoder."})
    vocabulary: str = field(metadata={"help": "Words by id (itos): .json, .txt with one word per line, or .pkl."})
    output: str = field(metadata={"help": "Directory for the model and its tokenizer."})
    overwrite: bool = flag(False, "Replace an existing model in --output.")
    allow_pickle: bool = flag(
        False, "Load a .pkl; pickles can execute code, so the file must come from a trusted source."
    )


def main() -> None:
    """Convert, and print a summary."""
    (arguments,) = parse_arguments(ConversionArguments, description=__doc__)
    check_output_free(arguments.output, arguments.overwrite)
    words = read_words(arguments.vocabulary, arguments.allow_pickle)
    model = read_fastai(arguments.weights)
    if len(words) != model.config.vocab_size:
        raise CtxError(
            f"{len(words)} words for {model.config.vocab_size} embeddings.",
            location=arguments.vocabulary,
            hint="give the words and the weights of the same model.",
        )
    tokenizer = build_ulmfit_tokenizer(words)
    model.config.pad_token_id, model.config.bos_token_id = tokenizer.pad_token_id, tokenizer.bos_token_id
    save_converted_model(model, tokenizer, arguments.output)
    print(f"{model.num_parameters():,} parameters: {arguments.weights} -> {arguments.output}")


if __name__ == "__main__":
    run_script(main)
