r"""Write a text for each line of a file: a translation, a summary, a question, or a continuation.

    hf-ctxmodels generate --model runs/cove --input test.en.gz --references test.de.gz --num_beams 5 \
        --output_file test.hypotheses
    hf-ctxmodels generate --model runs/gpt2 --input prompts.txt --do_sample --top_p 0.9 --output_file continued.txt
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedTokenizerBase
from transformers import set_seed as seed_generators

from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.core.languages import LanguagePair
from hf_ctxmodels.core.output_files import check_output_file, wrap_write_errors
from hf_ctxmodels.data.text_files import read_lines
from hf_ctxmodels.downstream.loading_with_adapters import load_model_with_adapters
from hf_ctxmodels.downstream.tasks.normalized_references import CEILING, NormalizedReferences
from hf_ctxmodels.downstream.tasks.text_metrics import corpus_bleu, metric_names, score_texts
from hf_ctxmodels.inference import generate_texts
from hf_ctxmodels.objectives.base import check_at_least
from hf_ctxmodels.tokenizers.base import check_tokenizer_matches_model
from hf_ctxmodels.training.model_loading import load_config, load_tokenizer
from hf_ctxmodels.training.recipe import parse_arguments


@dataclass
class GenerationArguments:
    """What is written, and how.

    Raises:
        CtxError: A flag of sampling or beams without sampling or beams, or a number out of its range.
    """

    model: str = field(
        metadata={"help": "Checkpoint directory or Hub id of an encoder-decoder or a decoder, with its tokenizer."}
    )
    input: str = field(metadata={"help": "File with one text a line, plain or .gz: sources, or prompts of a decoder."})
    output_file: str | None = flag(
        None, "Write the texts here, one a line; by default they are printed, unless --references are given."
    )
    overwrite: bool = flag(False, "Replace --output_file if it exists.")
    references: str | None = flag(None, "File with the right text for each line, to score against.")
    metrics: str = flag("bleu", "With --references: what is computed, of rouge, bleu and exact_match.")
    lower_case: bool = flag(False, "Score without regard to case.")
    max_new_tokens: int = flag(60, "Longest written text in tokens.")
    max_length: int | None = flag(
        None, "Cut each text to so many tokens; by default a text over the model's limit is an error."
    )
    batch_size: int = flag(64, "Texts at a time.")
    language: str | None = flag(
        None,
        "Language to write, where the model writes several: its mark, such as `<de>`, or its name in lang2id of the "
        "configuration.",
    )
    source_language: str | None = flag(
        None,
        "Language of the texts, for models with embeddings of both. Default: the one that `finetune --language` "
        "trained on.",
    )
    num_beams: int = flag(1, "Width of the beam search; 1 is greedy.")
    length_penalty: float | None = flag(
        None, "With beams: exponent of the length by which a beam's score is divided. Default: 1."
    )
    no_repeat_ngram_size: int = flag(0, "No sequence of so many tokens is written twice; 0 allows all.")
    do_sample: bool = flag(False, "Draw each token at random from the model's distribution.")
    temperature: float | None = flag(None, "With --do_sample: divides the logits. Default: 1.")
    top_k: int | None = flag(None, "With --do_sample: draw from the so many most probable tokens. Default: from all.")
    top_p: float | None = flag(None, "With --do_sample: draw from the most probable tokens of this share. Default: 1.")
    seed: int = flag(42, "With --do_sample: the same seed, texts and --batch_size give the same texts.")

    def __post_init__(self) -> None:
        self._check_numbers()
        for names, needed, given in (
            (("temperature", "top_k", "top_p"), "--do_sample", self.do_sample),
            (("length_penalty",), "--num_beams 2 or more", self.num_beams > 1),
        ):
            for name in names:
                if getattr(self, name) is not None and not given:
                    raise CtxError(
                        f"--{name} needs {needed}.", location=f"--{name} {getattr(self, name)}", hint="give both."
                    )

    def _check_numbers(self) -> None:
        for minimum, names in (
            (1, ("max_new_tokens", "max_length", "batch_size", "num_beams")),
            (0, ("no_repeat_ngram_size", "top_k")),
        ):
            given = {name: getattr(self, name) for name in names}
            check_at_least(minimum, **{name: value for name, value in given.items() if value is not None})
        if self.temperature is not None and self.temperature <= 0:
            raise CtxError(f"--temperature {self.temperature} is not above 0.", hint="use a small number, such as 0.1.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise CtxError(f"--top_p {self.top_p} is a share.", hint="use a number above 0, up to 1.")

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `generate_texts`."""
        names = ("max_new_tokens", "max_length", "batch_size", "language", "source_language", "num_beams", "do_sample")
        found: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.no_repeat_ngram_size:
            found["no_repeat_ngram_size"] = self.no_repeat_ngram_size
        if self.length_penalty is not None:
            found["length_penalty"] = self.length_penalty
        if self.do_sample:
            defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
            found |= {
                name: default if getattr(self, name) is None else getattr(self, name)
                for name, default in defaults.items()
            }
        return found


def writing_head(config: PreTrainedConfig, source: str) -> str:
    """Name of the Auto class of the head that writes; raises CtxError if the model has none."""
    for auto_class in (AutoModelForSeq2SeqLM, AutoModelForCausalLM):
        if type(config) in auto_class._model_mapping:
            return auto_class.__name__
    raise CtxError(
        f"{type(config).__name__} has no head that writes text.",
        location=source,
        hint="give an encoder-decoder or a decoder.",
    )


def lines_of(file: str) -> list[str]:
    """The lines of a file, stripped; raises CtxError if it has none."""
    lines = [line.strip() for line in read_lines(Path(file))]
    if not lines:
        raise CtxError("The file is empty.", location=file, hint="give a file with one text a line.")
    return lines


def scores(
    arguments: GenerationArguments,
    names: list[str],
    written: list[str],
    references: list[str],
    tokenizer: PreTrainedTokenizerBase,
) -> list[str]:
    """A line for each metric, BLEU's with its signature, and more if the tokenizer does not give references back."""
    if not names:
        return []
    found = []
    for name in names:
        if name == "bleu":
            bleu = corpus_bleu(written, references, lower_case=arguments.lower_case)
            found.append(f"BLEU {bleu.score:.2f}  {bleu.signature}")
        else:
            values = score_texts([name], written, references, lower_case=arguments.lower_case)
            found.append(pairs_of(values))
    told = LanguagePair.tokenizer_arguments(tokenizer, arguments.language)
    normalized = NormalizedReferences(tokenizer, names, lower_case=arguments.lower_case, tokenizer_arguments=told)
    if most := normalized.ceiling(references):
        found += [f"ceiling: {pairs_of(most)}", pairs_of(normalized.scores(written, references)), CEILING]
    return found


def pairs_of(values: dict[str, float]) -> str:
    """Names and values on one line."""
    return "  ".join(f"{key} {value:.4f}" for key, value in values.items())


def main() -> None:
    """Generate, write, print the scores."""
    (arguments,) = parse_arguments(GenerationArguments, description=__doc__)
    if arguments.output_file is not None:
        inputs = (arguments.input, arguments.references)
        check_output_file(arguments.output_file, flag="--output_file", overwrite=arguments.overwrite, inputs=inputs)
    names = [] if arguments.references is None else metric_names(arguments.metrics)
    texts = lines_of(arguments.input)
    references = [] if arguments.references is None else lines_of(arguments.references)
    if names and len(references) != len(texts):
        raise CtxError(
            f"{len(texts)} texts, {len(references)} references.",
            location=arguments.references,
            hint="give one for each.",
        )
    config, tokenizer = load_config(arguments.model), load_tokenizer(arguments.model)
    check_tokenizer_matches_model(tokenizer, config, location=arguments.model)
    model = load_model_with_adapters(arguments.model, writing_head(config, arguments.model), config)
    print_status(f"{type(model).__name__} writes {len(texts):,} texts")
    seed_generators(arguments.seed)
    written = generate_texts(model, tokenizer, texts, progress=True, **arguments.options)
    written = [" ".join(text.splitlines()) for text in written]  # one text a line
    if arguments.output_file is None and not names:
        print("\n".join(written))
    elif arguments.output_file is not None:
        with wrap_write_errors(arguments.output_file):
            Path(arguments.output_file).parent.mkdir(parents=True, exist_ok=True)
            Path(arguments.output_file).write_text("".join(f"{line}\n" for line in written), encoding="utf-8")
    print(f"{len(written)} texts written" + (f" to {arguments.output_file}" if arguments.output_file else ""))
    for line in scores(arguments, names, written, references, tokenizer):
        print(line)
