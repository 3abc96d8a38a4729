r"""A released MASS -> a model and its tokenizer: for translation with its BPE codes, for summaries with its dictionary.

python conversion/mass.py --checkpoint mass_ft_enfr_1024.pth --codes codes_enfr --language fr --output runs/mass
python conversion/mass.py --checkpoint mass-base-uncased.pt --vocabulary dict.txt --output runs/mass
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hf_ctxmodels import CtxBertTokenizer
from hf_ctxmodels.architectures.fastbpe_files import read_codes
from hf_ctxmodels.conversion.saving import check_output_free, save_converted_model
from hf_ctxmodels.core.errors import CtxError, run_script
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.text_files import read_lines
from hf_ctxmodels.models.mass.conversion_mass import (
    SpecialTokenIds,
    build_summarization_model,
    build_translation_model,
    build_translation_tokenizer,
    read_checkpoint,
)
from hf_ctxmodels.training.recipe import parse_arguments


@dataclass
class ConversionArguments:
    """What is converted."""

    checkpoint: str = field(metadata={"help": "The released file: .pth for translation, .pt for summaries."})
    output: str = field(metadata={"help": "Directory for the model and its tokenizer."})
    codes: str | None = flag(None, "Translation: the BPE codes, two subwords and a count a line.")
    vocabulary: str | None = flag(None, "Summaries: dict.txt, a token and a count a line; or BERT's vocab.txt.")
    language: str | None = flag(
        None, "Translation: the language that is written, where the decoder has maps of its own for each."
    )
    word_splitting: Literal["moses", "punctuation", "whitespace"] = flag(
        "moses", "Translation: how the tokenizer splits words; `whitespace` for text that is split already."
    )
    overwrite: bool = flag(False, "Replace the model that --output holds.")


def read_vocabulary(file: str) -> CtxBertTokenizer:
    """BERT's tokenizer with the first words of the lines of a file. Texts begin with no `[CLS]`, as in the release."""
    words = [line.split() for line in read_lines(Path(file))]
    if not all(words):
        raise CtxError("A line has no token.", location=f"{file}, line {1 + words.index([])}")
    vocabulary = {word[0]: number for number, word in enumerate(words)}
    return CtxBertTokenizer(vocab=vocabulary, cls_token=None, model_max_length=512)


def main() -> None:
    """Convert, and say what."""
    (arguments,) = parse_arguments(ConversionArguments, description=__doc__)
    check_output_free(arguments.output, arguments.overwrite)
    file = arguments.checkpoint
    found = read_checkpoint(file)
    translates = "encoder" in found
    needed = "codes" if translates else "vocabulary"
    given = getattr(arguments, needed)
    if given is None:
        kind = "translation" if translates else "summaries"
        raise CtxError(f"The checkpoint is one for {kind}.", location=file, hint=f"give --{needed}.")
    if translates:
        model = build_translation_model(found, file, arguments.language)
        tokenizer = build_translation_tokenizer(found, read_codes(given), file, arguments.word_splitting)
    else:
        tokenizer = read_vocabulary(given)
        first = tokenizer.convert_tokens_to_ids("[CLS]")
        special = SpecialTokenIds(tokenizer.pad_token_id, first, tokenizer.sep_token_id)
        model = build_summarization_model(found, file, special)
    if len(tokenizer) != model.config.vocab_size:
        raise CtxError(
            f"{len(tokenizer)} tokens for embeddings of {model.config.vocab_size}.",
            location=given,
            hint="give the files of one model.",
        )
    save_converted_model(model, tokenizer, arguments.output)
    print(f"{model.num_parameters():,} parameters: {file} -> {arguments.output}")


if __name__ == "__main__":
    run_script(main)
