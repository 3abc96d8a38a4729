r"""Convert a file of word vectors to a model, or a model to a file.

python conversion/word_vectors.py --input_format word2vec-binary --input FILE.bin --family word2vec \
    --output runs/vectors
python conversion/word_vectors.py --output_format glove --input runs/vectors --output vectors.txt
"""

from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoModel

from hf_ctxmodels.conversion.saving import check_output_free, save_converted_model
from hf_ctxmodels.conversion.word_vector_files import READERS, WRITERS
from hf_ctxmodels.conversion.word_vectors import WordVectors, gensim_models
from hf_ctxmodels.core.errors import CtxError, run_script
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.core.output_files import check_output_file
from hf_ctxmodels.training.model_loading import load_config, load_model, load_tokenizer
from hf_ctxmodels.training.recipe import parse_arguments

GENSIM = "gensim"


@dataclass
class ConversionArguments:
    """Arguments of the conversion."""

    input: str = field(metadata={"help": "File of word vectors; with --output_format, a model's directory or Hub id."})
    output: str = field(metadata={"help": "Directory for the model; with --output_format, a file."})
    input_format: str | None = field(
        default=None, metadata={"help": "Convert a file of this format to a model.", "choices": [*READERS, GENSIM]}
    )
    output_format: str | None = field(
        default=None, metadata={"help": "Convert a model to a file of this format.", "choices": [*WRITERS, GENSIM]}
    )
    family: str | None = flag(None, "Family of the model, with --input_format.")
    lower_case: bool = flag(False, "Lower-case text before words are looked up, with --input_format.")
    overwrite: bool = flag(False, "Replace an existing --output.")
    allow_pickle: bool = flag(
        False, "Load a gensim file; pickles can execute code, so it must come from a trusted source."
    )


def read_vectors(arguments: ConversionArguments) -> WordVectors:
    """Read the vectors of a file."""
    if arguments.input_format != GENSIM:
        return READERS[str(arguments.input_format)](arguments.input)
    if not arguments.allow_pickle:
        raise CtxError(
            "A file saved by gensim is a pickle, which can execute code.",
            location=arguments.input,
            hint="give --allow_pickle if you trust its source, or save it with gensim's save_word2vec_format.",
        )
    loaded = gensim_models().KeyedVectors.load(arguments.input)
    return WordVectors.from_gensim(getattr(loaded, "wv", loaded))


def main() -> None:
    """Convert, and print a summary."""
    (arguments,) = parse_arguments(ConversionArguments, description=__doc__)
    if (arguments.input_format is None) == (arguments.output_format is None):
        raise CtxError("The format is missing or ambiguous.", hint="give either --input_format or --output_format.")
    if arguments.input_format is not None:
        check_output_free(arguments.output, arguments.overwrite)
        vectors = read_vectors(arguments)
        vectors.lower_case = arguments.lower_case
        if arguments.family is None:
            raise CtxError("The family of the model is missing.", location="--family", hint="give --family.")
        save_converted_model(*vectors.to_model(arguments.family), arguments.output)
    else:
        check_output_file(arguments.output, flag="--output", overwrite=arguments.overwrite)
        model = load_model(arguments.input, AutoModel.__name__, load_config(arguments.input))
        vectors = WordVectors.from_model(model, load_tokenizer(arguments.input))
        Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
        if arguments.output_format == GENSIM:
            vectors.to_gensim().save(arguments.output)
        else:
            WRITERS[arguments.output_format](vectors, arguments.output)
    shape = f"{len(vectors.words)} words of {vectors.matrix.shape[1]} dimensions"
    print(f"{shape}: {arguments.input} -> {arguments.output}")


if __name__ == "__main__":
    run_script(main)
