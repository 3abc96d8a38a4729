r"""Convert a released MASS to a model and its tokenizer, from BPE codes (translation) or a vocabulary (summaries).

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
    """Arguments of the conversion."""

    checkpoint: str = field(metadata={"help": "Released file: .pth for translation, .pt for summaries."})
    output: str = field(metadata={"help": "Directory for the model and its tokenizer."})
    codes: str | None = flag(None, "Translation: BPE codes, two tokens and a count per line.")
    vocabulary: str | None = flag(None, "Summaries: dict.txt with a token and a count per line, or BERT's vocab.txt.")
    language: str | None = flag(None, "Translation: target language, if the decoder has separate layers for each.")
    word_splitting: Literal["moses", "punctuation", "whitespace"] = flag(
        "moses", "Translation: word splitting of the tokenizer; `whitespace` for tokenized text."
    )
    overwrite: bool = flag(False, "Replace an existing model in --output.")


def read_vocabulary(file: str) -> CtxBertTokenizer:
    """Create BERT's tokenizer from the first word of each line of a file. As in the release, it adds no `[CLS]`."""
    lines = [line.split() for line in read_lines(Path(file))]
    if not all(lines):
        raise CtxError("A line has no token.", location=f"{file}, line {1 + lines.index([])}")
    vocabulary = {fields[0]: number for number, fields in enumerate(lines)}
    return CtxBertTokenizer(vocab=vocabulary, cls_token=None, model_max_length=512)


def main() -> None:
    """Convert, and print a summary."""
    (arguments,) = parse_arguments(ConversionArguments, description=__doc__)
    check_output_free(arguments.output, arguments.overwrite)
    file = arguments.checkpoint
    checkpoint = read_checkpoint(file)
    if "encoder" in checkpoint:
        if arguments.codes is None:
            raise CtxError("The checkpoint is a translation model.", location=file, hint="give --codes.")
        model = build_translation_model(checkpoint, file, arguments.language)
        codes = read_codes(arguments.codes)
        tokenizer = build_translation_tokenizer(checkpoint, codes, file, arguments.word_splitting)
    else:
        if arguments.vocabulary is None:
            raise CtxError("The checkpoint is a summarization model.", location=file, hint="give --vocabulary.")
        tokenizer = read_vocabulary(arguments.vocabulary)
        start_id = tokenizer.convert_tokens_to_ids("[CLS]")
        special = SpecialTokenIds(tokenizer.pad_token_id, start_id, tokenizer.sep_token_id)
        model = build_summarization_model(checkpoint, file, special)
    if len(tokenizer) != model.config.vocab_size:
        raise CtxError(
            f"{len(tokenizer)} tokens for {model.config.vocab_size} embeddings.",
            location=arguments.codes or arguments.vocabulary,
            hint="give the files of the same model.",
        )
    save_converted_model(model, tokenizer, arguments.output)
    print(f"{model.num_parameters():,} parameters: {file} -> {arguments.output}")


if __name__ == "__main__":
    run_script(main)
