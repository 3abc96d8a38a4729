r"""Released MT-LSTM weights and a file of word vectors -> a CoVe encoder and its tokenizer.

python conversion/cove.py --weights wmtlstm.pth --vectors glove.840B.300d.txt --output runs/cove
"""

from dataclasses import dataclass, field

from hf_ctxmodels import CtxCoveTokenizer
from hf_ctxmodels.errors import run_script
from hf_ctxmodels.flags import flag
from hf_ctxmodels.models.cove.conversion_cove import cove_of_weights, read_state_dict
from hf_ctxmodels.tokenization_words import SPECIAL_TOKENS
from hf_ctxmodels.training.recipe import parse_arguments
from hf_ctxmodels.word_files import READERS


@dataclass
class ConversionArguments:
    """What is converted."""

    weights: str = field(metadata={"help": "The state dict of the encoder."})
    vectors: str = field(metadata={"help": "The file of word vectors that it reads."})
    output: str = field(metadata={"help": "Directory for the model and its tokenizer."})
    read: str = field(default="glove", metadata={"help": "The form of that file.", "choices": list(READERS)})
    do_lower_case: bool = flag(False, "The vectors are those of lower-cased words.")


def main() -> None:
    """Convert, and say what."""
    (arguments,) = parse_arguments(ConversionArguments, description=__doc__)
    found = READERS[arguments.read](arguments.vectors)
    kept = [place for place, word in enumerate(found.words) if word not in SPECIAL_TOKENS]
    model = cove_of_weights(read_state_dict(arguments.weights), found.matrix[kept], arguments.weights)
    # the released models were trained on text that had been split into words
    tokenizer = CtxCoveTokenizer.from_words(
        [found.words[place] for place in kept], do_lower_case=arguments.do_lower_case, split_punctuation=False
    )
    for part in (model, tokenizer):
        part.save_pretrained(arguments.output)
    number = sum(parameter.numel() for parameter in model.layers.parameters())
    print(f"{number:,} parameters on {len(kept):,} vectors: {arguments.weights} -> {arguments.output}")


if __name__ == "__main__":
    run_script(main)
