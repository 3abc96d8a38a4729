r"""Files of word vectors -> a model, and back.

python conversion/word_vectors.py --read word2vec-binary --input FILE.bin --family word2vec --output runs/vectors
python conversion/word_vectors.py --write glove --input runs/vectors --output vectors.txt
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
    """What is converted into what."""

    input: str = field(metadata={"help": "With --read a file, with --write a model's directory or Hub id."})
    output: str = field(metadata={"help": "With --read a directory for the model, with --write a file."})
    read: str | None = field(
        default=None, metadata={"help": "The file's form; makes a model of it.", "choices": [*READERS, GENSIM]}
    )
    write: str | None = field(
        default=None,
        metadata={"help": "The file's form; writes a model's vectors to it.", "choices": [*WRITERS, GENSIM]},
    )
    family: str | None = flag(None, "With --read, the model's family.")
    lower_case: bool = flag(False, "With --read, lower-case text before words are looked up.")
    overwrite: bool = flag(False, "Replace what --output holds.")
    allow_pickle: bool = flag(
        False, "Open a gensim file. It is a pickle, which runs the code it holds: only if you trust it."
    )


def read(arguments: ConversionArguments) -> WordVectors:
    """The vectors of a file."""
    if arguments.read != GENSIM:
        return READERS[str(arguments.read)](arguments.input)
    if not arguments.allow_pickle:
        raise CtxError(
            "A file saved by gensim is a pickle, and opening it runs what code it holds.",
            location=arguments.input,
            hint="give --allow_pickle if you trust it, or save it in gensim with save_word2vec_format.",
        )
    opened = gensim_models().KeyedVectors.load(arguments.input)
    return WordVectors.from_gensim(getattr(opened, "wv", opened))


def main() -> None:
    """Convert, and say what."""
    (arguments,) = parse_arguments(ConversionArguments, description=__doc__)
    if (arguments.read is None) == (arguments.write is None):
        raise CtxError("Nothing or too much to do.", hint="give exactly one of --read and --write.")
    if arguments.read is not None:
        check_output_free(arguments.output, arguments.overwrite)
        vectors = read(arguments)
        vectors.lower_case = arguments.lower_case
        if arguments.family is None:
            raise CtxError("Whose model shall it be?", location="--family", hint="give --family.")
        save_converted_model(*vectors.to_model(arguments.family), arguments.output)
    else:
        check_output_file(arguments.output, flag="--output", overwrite=arguments.overwrite)
        model = load_model(arguments.input, AutoModel.__name__, load_config(arguments.input))
        vectors = WordVectors.from_model(model, load_tokenizer(arguments.input))
        Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
        if arguments.write == GENSIM:
            vectors.to_gensim().save(arguments.output)
        else:
            WRITERS[arguments.write](vectors, arguments.output)
    shape = f"{len(vectors.words)} words of {vectors.matrix.shape[1]} dimensions"
    print(f"{shape}: {arguments.input} -> {arguments.output}")


if __name__ == "__main__":
    run_script(main)
