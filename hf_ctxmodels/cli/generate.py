r"""Generate a text for each line of a file: a translation, a summary, a question, or a continuation.

    hf-ctxmodels generate --model runs/cove --input test.en.gz --references test.de.gz --decoding beam:num_beams=5 \
        --output_file test.hypotheses
    hf-ctxmodels generate --model runs/gpt2 --input prompts.txt --decoding sample:top_p=0.9 --output_file continued.txt
"""

from dataclasses import dataclass
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedTokenizerBase
from transformers import set_seed as seed_generators

from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.constants import MAX_SEED
from hf_ctxmodels.core.devices import DeviceArguments
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import REQUIRED, check_range, flag, parse_choices
from hf_ctxmodels.core.generation import LanguagePair
from hf_ctxmodels.core.output_files import check_output_file, write_text_file
from hf_ctxmodels.data.text_files import read_lines
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import load_model_and_tokenizer
from hf_ctxmodels.downstream.tasks.base import repeated_prediction
from hf_ctxmodels.downstream.tasks.metrics import metric_range
from hf_ctxmodels.downstream.tasks.seq2seq import CONSTANT_SHARE
from hf_ctxmodels.downstream.tasks.text_metrics import (
    UPPER_BOUND_NOTE,
    NormalizedReferences,
    corpus_bleu,
    metric_names,
    score_texts,
)
from hf_ctxmodels.inference import generate_texts


@dataclass(frozen=True)
class GreedyOptions:
    """The most probable token in each step."""


@dataclass(frozen=True)
class BeamOptions:
    """Beam search."""

    num_beams: int = flag(5, "Width of the beam search.")
    length_penalty: float | None = flag(
        None, "Exponent of the length by which the score of a beam is divided; by default the exponent of the model."
    )

    def __post_init__(self) -> None:
        check_range(self, "num_beams", at_least=1, location="--decoding beam")


@dataclass(frozen=True)
class SamplingOptions:
    """Random sampling."""

    temperature: float = flag(1.0, "Softmax temperature.")
    top_k: int = flag(0, "Sample from the k most probable tokens; 0 for all.")
    top_p: float = flag(1.0, "Nucleus sampling: cumulative probability of the most probable tokens.")
    num_beams: int = flag(1, "Width of the beam search, for beam sampling.")
    seed: int = flag(42, "Random seed; the result also depends on --batch_size.")

    def __post_init__(self) -> None:
        check_range(self, "temperature", above=0, location="--decoding sample")
        check_range(self, "top_k", at_least=0, location="--decoding sample")
        check_range(self, "num_beams", at_least=1, location="--decoding sample")
        check_range(self, "top_p", above=0, at_most=1, location="--decoding sample")
        check_range(self, "seed", at_least=0, at_most=MAX_SEED, location="--decoding sample")


@dataclass
class GenerationArguments:
    """Model, input and output."""

    model: str = flag(
        REQUIRED, "Checkpoint directory or Hub id of an encoder-decoder or a decoder, with its tokenizer."
    )
    input: str = flag(REQUIRED, "File with one source or prompt per line, optionally .gz or .zst.")
    output_file: str | None = flag(
        None, "File for the generated texts, one per line; by default they are printed, unless --references are given."
    )
    overwrite: bool = flag(False, "Replace --output_file if it exists.")
    decoding: GreedyOptions | BeamOptions | SamplingOptions = flag(
        "greedy", "Decoding method.", {"greedy": GreedyOptions, "beam": BeamOptions, "sample": SamplingOptions}
    )
    max_new_tokens: int = flag(60, "Longest generated text in tokens.")
    no_repeat_ngram_size: int = flag(0, "Size of n-grams that are not repeated within a text; 0 allows all.")
    max_length: int | None = flag(
        None, "Truncate inputs to N tokens; by default an input over the model's limit is an error."
    )
    batch_size: int = flag(64, "Texts per batch.")
    language: str | None = flag(
        None, "Language to generate, for multilingual models: a token, such as `<de>`, or a name in lang2id."
    )
    source_language: str | None = flag(
        None, "Language of the input, for models with language embeddings; by default the language of fine-tuning."
    )
    references: str | None = flag(None, "File with the reference text of each line, to compute --metrics with.")
    metrics: str = flag("bleu", "Metrics, separated by commas: rouge, bleu, exact_match.")
    lower_case: bool = flag(False, "Ignore case in the metrics.")

    def __post_init__(self) -> None:
        parse_choices(self)
        check_range(self, "max_new_tokens", "max_length", "batch_size", at_least=1)
        check_range(self, "no_repeat_ngram_size", at_least=0)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `generate_texts`."""
        names = ("max_new_tokens", "max_length", "batch_size", "language", "source_language")
        options: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.no_repeat_ngram_size:
            options["no_repeat_ngram_size"] = self.no_repeat_ngram_size
        options |= {"num_beams": 1, "do_sample": False}
        match self.decoding:
            case BeamOptions(num_beams, length_penalty):
                options["num_beams"] = num_beams
                if length_penalty is not None:
                    options["length_penalty"] = length_penalty
            case SamplingOptions(temperature, top_k, top_p, num_beams):
                options |= {"do_sample": True, "num_beams": num_beams}
                options |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        return options


def main() -> None:
    """Generate, and print or write the texts and the metrics."""
    arguments, placement = parse_arguments(GenerationArguments, DeviceArguments, description=__doc__)
    if arguments.output_file is not None:
        inputs = (arguments.input, arguments.references)
        check_output_file(arguments.output_file, flag="--output_file", overwrite=arguments.overwrite, inputs=inputs)
    names = [] if arguments.references is None else metric_names(arguments.metrics)
    texts = _read_texts(arguments.input)
    references = [] if arguments.references is None else _read_texts(arguments.references)
    if names and len(references) != len(texts):
        raise CtxError(
            f"Expected one reference per text, got {len(texts)} texts and {len(references)} references.",
            location=arguments.references,
            hint="use a file with a reference for each line of --input.",
        )
    model, tokenizer = load_model_and_tokenizer(arguments.model, _generation_head)
    placement.place(model)
    print_status(f"{type(model).__name__} generates {len(texts):,} texts")
    if isinstance(arguments.decoding, SamplingOptions):
        seed_generators(arguments.decoding.seed)
    generated = generate_texts(model, tokenizer, texts, progress=True, **arguments.options)
    generated = [" ".join(text.splitlines()) for text in generated]  # one text per line
    if arguments.output_file is None and not names:
        print("\n".join(generated))
    elif arguments.output_file is not None:
        write_text_file(arguments.output_file, "".join(f"{line}\n" for line in generated))
    print(f"{len(generated):,} texts generated" + (f", in {arguments.output_file}" if arguments.output_file else ""))
    if names:
        _print_metrics(arguments, names, generated, references, tokenizer)
    output_by_text = dict(zip(texts, generated))
    repeated = repeated_prediction([*output_by_text.values()], [*output_by_text], CONSTANT_SHARE)
    if repeated is not None:
        print_status(
            f"warning: (nearly) all of {len(output_by_text):,} inputs have the output {repeated[:60]!r}; hint: train "
            "the model longer, with a higher --learning_rate or another initializer_range."
        )


def _generation_head(config: PreTrainedConfig) -> str:
    """Name of the Auto class of the head that generates; raises CtxError if the model has none."""
    for auto_class in (AutoModelForSeq2SeqLM, AutoModelForCausalLM):
        if type(config) in auto_class._model_mapping:
            return auto_class.__name__
    raise CtxError(
        f"{type(config).__name__} has no head that generates text.",
        location=config.name_or_path,
        hint="use an encoder-decoder or a decoder.",
    )


def _read_texts(file: str) -> list[str]:
    """The stripped lines of a file; raises CtxError if it has none."""
    lines = [line.strip() for line in read_lines(file)]
    if not lines:
        raise CtxError("The file is empty.", location=file, hint="use a file with one text per line.")
    return lines


def _print_metrics(
    arguments: GenerationArguments,
    names: list[str],
    generated: list[str],
    references: list[str],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Print a line per metric, and the upper bounds if the tokenizer cannot reproduce the references."""

    def line(values: dict[str, float]) -> str:
        return "  ".join(f"{key} {value:.4f}" for key, value in values.items())

    for name in names:
        if name == "bleu":
            bleu = corpus_bleu(generated, references, lower_case=arguments.lower_case)
            print(f"BLEU {bleu.score:.2f}  {bleu.signature}  ({metric_range(name)})")
        else:
            scores = score_texts([name], generated, references, lower_case=arguments.lower_case)
            print(f"{line(scores)}  ({metric_range(name)})")
    languages = LanguagePair.tokenizer_arguments(tokenizer, arguments.language)
    normalized = NormalizedReferences(tokenizer, names, lower_case=arguments.lower_case, tokenizer_arguments=languages)
    if upper_bounds := normalized.upper_bounds(references):
        print(f"upper bound: {line(upper_bounds)}")
        print(line(normalized.scores(generated, references)), UPPER_BOUND_NOTE, sep="\n")
