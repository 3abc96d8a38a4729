"""Conversion of released encoders on word vectors."""

from dataclasses import dataclass, field
from typing import Any

from hf_ctxmodels.architectures.torch_lstm_conversion import model_on_vectors, read_state_dict
from hf_ctxmodels.conversion.saving import check_output_free, save_converted_model
from hf_ctxmodels.conversion.word_vector_files import READERS
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.registry import get_family
from hf_ctxmodels.tokenizers.word_level import SPECIAL_TOKENS


@dataclass
class VectorConversionArguments:
    """The files of a conversion."""

    weights: str = field(metadata={"help": "The state dict of the encoder."})
    vectors: str = field(metadata={"help": "The file of its word vectors."})
    output: str = field(metadata={"help": "Directory for the model and its tokenizer."})
    read: str = field(default="glove", metadata={"help": "The format of that file.", "choices": list(READERS)})
    do_lower_case: bool = flag(False, "The words are in lower case.")
    overwrite: bool = flag(False, "Replace the model that --output holds.")


def convert(arguments: VectorConversionArguments, family: str, **fields: Any) -> str:
    """Save a family's model with these weights, and its tokenizer; returns a summary to print.

    The tokenizer splits at white space, since the released models were trained on tokenized text.

    Args:
        arguments: The files.
        family: Name of the family.
        fields: Configuration fields; `bos_token` and `eos_token` are used by the tokenizer if they have vectors.

    Raises:
        CtxError: A file cannot be read, or the files do not match.
    """
    check_output_free(arguments.output, arguments.overwrite)
    found, row = READERS[arguments.read](arguments.vectors), get_family(family)
    kept = [place for place, word in enumerate(found.words) if word not in SPECIAL_TOKENS]
    words = [found.words[place] for place in kept]
    marks = {name: fields.pop(name) for name in ("bos_token", "eos_token") if name in fields}
    marks = {name: word for name, word in marks.items() if word in found.word_to_index}
    model = model_on_vectors(
        row.models["AutoModel"], read_state_dict(arguments.weights), found.matrix[kept], arguments.weights, **fields
    )
    tokenizer = row.tokenizer.from_words(words, do_lower_case=arguments.do_lower_case, split_punctuation=False, **marks)
    save_converted_model(model, tokenizer, arguments.output)
    number = sum(parameter.numel() for parameter in model.layers.parameters())
    marked = f", between {' and '.join(marks.values())}" if marks else ""
    return f"{number:,} parameters on {len(kept):,} vectors{marked}: {arguments.weights} -> {arguments.output}"
