"""Conversion of released encoders that are trained on word vectors (CoVe, InferSent)."""

from dataclasses import dataclass, field
from typing import Any

from hf_ctxmodels.conversion.saving import check_output_free, save_converted_model
from hf_ctxmodels.conversion.torch_lstm import model_on_vectors, read_state_dict
from hf_ctxmodels.conversion.word_vector_files import READERS
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.registry import get_family
from hf_ctxmodels.tokenizers.word_level import SPECIAL_TOKENS


@dataclass
class VectorConversionArguments:
    """Arguments of the conversion."""

    weights: str = field(metadata={"help": "State dict of the encoder."})
    vectors: str = field(metadata={"help": "File of its word vectors."})
    output: str = field(metadata={"help": "Directory for the model and its tokenizer."})
    vectors_format: str = field(default="glove", metadata={"help": "Format of --vectors.", "choices": list(READERS)})
    do_lower_case: bool = flag(False, "Lower-case text before words are looked up.")
    overwrite: bool = flag(False, "Replace an existing model in --output.")


def convert(arguments: VectorConversionArguments, family: str, **fields: Any) -> str:
    """Convert an encoder, and save the model and its tokenizer; returns a summary.

    The tokenizer splits at white space, since the released models were trained on tokenized text.

    Args:
        arguments: Files and options.
        family: Name of the family.
        fields: Configuration fields; `bos_token` and `eos_token` are arguments of the tokenizer, used if they have
            vectors.

    Raises:
        CtxError: A file cannot be read, or the files do not match.
    """
    check_output_free(arguments.output, arguments.overwrite)
    vectors, spec = READERS[arguments.vectors_format](arguments.vectors), get_family(family)
    rows = [row for row, word in enumerate(vectors.words) if word not in SPECIAL_TOKENS]
    words = [vectors.words[row] for row in rows]
    special_tokens = {name: fields.pop(name) for name in ("bos_token", "eos_token") if name in fields}
    special_tokens = {name: token for name, token in special_tokens.items() if token in vectors.word_to_index}
    model = model_on_vectors(
        spec.models["AutoModel"], read_state_dict(arguments.weights), vectors.matrix[rows], arguments.weights, **fields
    )
    tokenizer = spec.tokenizer.from_words(
        words, do_lower_case=arguments.do_lower_case, split_punctuation=False, **special_tokens
    )
    save_converted_model(model, tokenizer, arguments.output)
    number = sum(parameter.numel() for parameter in model.layers.parameters())
    suffix = f", with {' and '.join(special_tokens.values())}" if special_tokens else ""
    return f"{number:,} parameters on {len(rows):,} vectors{suffix}: {arguments.weights} -> {arguments.output}"
