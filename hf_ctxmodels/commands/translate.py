r"""Translate a file line by line; with references, say how near they are.

    hf-ctxmodels translate --model runs/cove --input test.en.gz --references test.de.gz --num_beams 5 \
        --output_file test.hypotheses
"""

from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoModelForSeq2SeqLM

from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.core.outputs import check_new_file
from hf_ctxmodels.data.files import read_lines
from hf_ctxmodels.inference import score_translations, translate
from hf_ctxmodels.tokenizers.base import check_fit
from hf_ctxmodels.training.loading import load_config, load_model, load_tokenizer
from hf_ctxmodels.training.recipe import parse_arguments


@dataclass
class TranslationArguments:
    """What is translated."""

    model: str = field(metadata={"help": "Checkpoint directory or Hub id of a translation model, with its tokenizer."})
    input: str = field(metadata={"help": "File with one text a line, plain or .gz."})
    references: str | None = flag(None, "File with the translation of each line, to score against.")
    output_file: str | None = flag(None, "Write the translations here, one a line.")
    overwrite: bool = flag(False, "Replace --output_file if it exists.")
    num_beams: int = flag(1, "Width of the beam search; 1 is greedy.")
    length_penalty: float = flag(1.0, "Exponent of the length by which a beam's score is divided.")
    max_new_tokens: int = flag(60, "Longest translation in tokens.")
    batch_size: int = flag(64, "Texts at a time.")
    language: str | None = flag(None, "Mark of the language to write, such as `<de>`, where the model writes several.")
    lower_case: bool = flag(False, "Score without regard to case.")


def main() -> None:
    """Translate, write, print the score."""
    (arguments,) = parse_arguments(TranslationArguments, description=__doc__)
    if arguments.output_file is not None:
        inputs = (arguments.input, arguments.references)
        check_new_file(arguments.output_file, flag="--output_file", overwrite=arguments.overwrite, inputs=inputs)
    config, tokenizer = load_config(arguments.model), load_tokenizer(arguments.model)
    check_fit(tokenizer, config, location=arguments.model)
    texts = [line.strip() for line in read_lines(Path(arguments.input))]
    model = load_model(arguments.model, AutoModelForSeq2SeqLM.__name__, config)
    beams = {} if arguments.num_beams == 1 else {"length_penalty": arguments.length_penalty}
    translations = translate(
        model,
        tokenizer,
        texts,
        num_beams=arguments.num_beams,
        max_new_tokens=arguments.max_new_tokens,
        batch_size=arguments.batch_size,
        language=arguments.language,
        **beams,
    )
    if arguments.output_file:
        Path(arguments.output_file).parent.mkdir(parents=True, exist_ok=True)
        Path(arguments.output_file).write_text("".join(f"{line}\n" for line in translations), encoding="utf-8")
    print(f"{len(translations)} texts translated")
    if arguments.references is not None:
        references = [line.strip() for line in read_lines(Path(arguments.references))]
        score = score_translations(translations, references, lower_case=arguments.lower_case)
        print(f"BLEU {score.bleu:.2f}  {score.signature}")
