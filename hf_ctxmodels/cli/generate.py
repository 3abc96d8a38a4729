r"""Generate a text for each line of a file: a translation, a summary, a question, or a continuation.

    hf-ctxmodels generate --model runs/cove --input test.en.gz --references test.de.gz --decoding beam:num_beams=5 \
        --output_file test.hypotheses
    hf-ctxmodels generate --model runs/gpt2 --input prompts.txt --decoding sample:top_p=0.9 --output_file continued.txt
    hf-ctxmodels generate --model runs/gpt2-codes --control Reviews --num_texts 4 --decoding sample:top_p=0.9
    hf-ctxmodels generate --model runs/grover --fields "title=A storm" date=2019-04-06 --decoding sample:top_p=0.95

The texts are printed, or written to --output_file.
"""

import json
from dataclasses import dataclass
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LogitsProcessor,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers import set_seed as seed_generators

from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.console import format_count, print_status
from hf_ctxmodels.core.constants import MAX_SEED, NEWS_FIELDS
from hf_ctxmodels.core.devices import DeviceArguments
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import (
    REQUIRED,
    check_range,
    flag,
    make_options,
    non_default_fields,
    parse_choices,
    split_choice,
)
from hf_ctxmodels.core.generation import LanguagePair
from hf_ctxmodels.core.loading import require_existing_path
from hf_ctxmodels.core.output_files import check_output_file, write_text_file
from hf_ctxmodels.data.document_sources import load_documents
from hf_ctxmodels.data.documents import NewsArticle
from hf_ctxmodels.data.files import file_suffix, require_file
from hf_ctxmodels.data.record_files import RECORD_SUFFIXES
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
from hf_ctxmodels.inference import (
    ClassifierGuidance,
    bag_of_words,
    detection_examples,
    generate_field,
    generate_fields,
    generate_texts,
)


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
    input: str | None = flag(
        None, "File with one source or prompt per line, optionally .gz or .zst; with --target a .jsonl of articles."
    )
    output_file: str | None = flag(
        None,
        "File for the generated texts, one per line, optionally .gz or .zst; by default they are printed, unless "
        "--references are given.",
    )
    overwrite: bool = flag(False, "Replace --output_file if it exists.")
    decoding: GreedyOptions | BeamOptions | SamplingOptions = flag(
        "greedy", "Decoding method.", {"greedy": GreedyOptions, "beam": BeamOptions, "sample": SamplingOptions}
    )
    max_new_tokens: int = flag(60, "Longest generated text in tokens.")
    num_texts: int = flag(1, "Texts for each prompt, by sampling.")
    no_repeat_ngram_size: int | None = flag(
        None,
        "Size of n-grams that are not repeated within a text; 0 allows all; by default as in the generation config.",
    )
    repetition_penalty: float | None = flag(
        None,
        "Divide the positive logits of tokens of the prompt and the text by this, and multiply the negative ones "
        "(CTRL: 1.2); 1 for none; by default as in the generation config.",
    )
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
        check_range(self, "max_new_tokens", "max_length", "batch_size", "num_texts", at_least=1)
        check_range(self, "no_repeat_ngram_size", at_least=0)
        check_range(self, "repetition_penalty", above=0)
        unused = sorted(non_default_fields(self) & {"metrics", "lower_case"}) if self.references is None else []
        if unused:
            raise CtxError(
                f"{unused[0]} belongs to the metrics, which need references.",
                location=f"--{unused[0]}",
                hint=f"pass --references, or omit --{unused[0]}.",
            )
        if self.num_texts > 1 and (self.references is not None or not isinstance(self.decoding, SamplingOptions)):
            raise CtxError(
                f"num_texts={self.num_texts}, but "
                + ("each reference has one text." if self.references else "without sampling all texts are equal."),
                location="--num_texts",
                hint="omit --references, and pass --decoding sample.",
            )

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `generate_texts`."""
        names = ("max_new_tokens", "max_length", "batch_size", "language", "source_language")
        options: dict[str, Any] = {name: getattr(self, name) for name in names}
        return options | self.decoding_options

    @property
    def decoding_options(self) -> dict[str, Any]:
        """Keyword arguments of `generate`."""
        options: dict[str, Any] = {"num_beams": 1, "do_sample": False}
        if self.no_repeat_ngram_size is not None:
            options["no_repeat_ngram_size"] = self.no_repeat_ngram_size
        if self.repetition_penalty is not None:
            options["repetition_penalty"] = self.repetition_penalty
        match self.decoding:
            case BeamOptions(num_beams, length_penalty):
                options["num_beams"] = num_beams
                if length_penalty is not None:
                    options["length_penalty"] = length_penalty
            case SamplingOptions(temperature, top_k, top_p, num_beams):
                options |= {"do_sample": True, "num_beams": num_beams}
                options |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        return options


@dataclass(frozen=True)
class BagOfWordsOptions:
    """Options of `--bag_of_words`."""

    bias: float = flag(2.0, "Added to the logit of a word.")


@dataclass(frozen=True)
class FudgeOptions:
    """Options of `--fudge`."""

    label: str = flag(REQUIRED, "Label of the generated text by the classifier.")
    weight: float = flag(1.0, "Weight of the log-probability of the label; 0 for no guidance.")
    num_candidates: int = flag(50, "Most probable next tokens that the classifier reads; 0 for all.")

    def __post_init__(self) -> None:
        check_range(self, "num_candidates", at_least=0, location="--fudge")


@dataclass
class ControlArguments:
    """Control of the text."""

    control: str | None = flag(None, "Control code of a model that was trained with codes; --input is then optional.")
    bag_of_words: str | None = flag(
        None, "File with one word per line, whose logits are raised: FILE or FILE:bias=X (default: 2).", nested=True
    )
    fudge: str | None = flag(
        None,
        "Text classifier, directory or Hub id, that makes the text more likely to have a label (FUDGE): "
        "CLASSIFIER:label=LABEL,weight=X,num_candidates=N; an unknown option raises an error that lists the options.",
        nested=True,
    )

    def __post_init__(self) -> None:
        if self.bag_of_words is not None:
            self._parse(self.bag_of_words, BagOfWordsOptions, "--bag_of_words")
        if self.fudge is not None:
            self._parse(self.fudge, FudgeOptions, "--fudge")

    @property
    def bag_of_words_file(self) -> str | None:
        """The file of `--bag_of_words` without its options."""
        return None if self.bag_of_words is None else split_choice(self.bag_of_words)[0]

    def check_paths(self) -> None:
        """Raise CtxError if the file of `--bag_of_words` or the classifier of `--fudge` does not exist."""
        if self.bag_of_words_file is not None:
            require_file(self.bag_of_words_file)
        if self.fudge is not None:
            require_existing_path(split_choice(self.fudge)[0])

    @staticmethod
    def _parse(text: str, options: type[Any], flag_name: str) -> tuple[str, Any]:
        """The file or model of a flag, and its options."""
        name, option_strings = split_choice(text)
        return name, make_options(options, name, option_strings, f"{flag_name} {name}")

    def options(self, tokenizer: PreTrainedTokenizerBase, placement: DeviceArguments) -> dict[str, Any]:
        """Keyword arguments of `generate`: the processors of the logits, if there are any."""
        processors: list[LogitsProcessor] = []
        if self.bag_of_words is not None:
            file, bag = self._parse(self.bag_of_words, BagOfWordsOptions, "--bag_of_words")
            processors.append(bag_of_words(tokenizer, _read_texts(file), bag.bias))
        if self.fudge is not None:
            classifier, fudge = self._parse(self.fudge, FudgeOptions, "--fudge")
            guidance = ClassifierGuidance.open(
                classifier, tokenizer, fudge.label, fudge.weight, num_candidates=fudge.num_candidates
            )
            placement.place(guidance.classifier)
            processors.append(guidance)
        return {"logits_processor": processors} if processors else {}


@dataclass
class FieldArguments:
    """Fields of news articles."""

    fields: list[str] = flag(
        (), f"Fields of an article as NAME=TEXT, of {', '.join(NEWS_FIELDS)}: Grover generates --target from them."
    )
    target: str | None = flag(
        None,
        "Field that Grover generates, by default `article`; with --input for each article. A .jsonl --output_file has "
        "the texts of the articles that have this field as well, with the labels `human` and `generated`.",
        choices=NEWS_FIELDS,
    )

    def __post_init__(self) -> None:
        if any("=" not in text for text in self.fields):
            raise CtxError(f"{' '.join(self.fields)!r} is not NAME=TEXT.", location="--fields", hint="use NAME=TEXT.")
        if self.fields and self.target is None:
            self.target = "article"

    @property
    def values(self) -> dict[str, Any]:
        """Field -> value in the format of news files; authors are separated by commas."""
        values: dict[str, Any] = dict(text.split("=", 1) for text in self.fields)
        if "authors" in values:
            values["authors"] = values["authors"].split(",")
        return values


def main() -> None:
    """Generate, and print or write the texts and the metrics."""
    arguments, control, fields, placement = parse_arguments(
        GenerationArguments, ControlArguments, FieldArguments, DeviceArguments, description=__doc__
    )
    _check_sources(arguments, control, fields)
    if arguments.output_file is not None:
        inputs = (arguments.input, arguments.references, control.bag_of_words_file)
        check_output_file(arguments.output_file, flag="--output_file", overwrite=arguments.overwrite, inputs=inputs)
    control.check_paths()  # before the model is loaded
    names = [] if arguments.references is None else metric_names(arguments.metrics)
    if fields.target is not None:
        _generate_fields(arguments, control, fields, placement)
        return
    texts = [""] if arguments.input is None else _read_texts(arguments.input)
    locations = [f"{arguments.input}:{number}" for number in range(1, len(texts) + 1)] if arguments.input else []
    texts, locations = ([item for item in items for _ in range(arguments.num_texts)] for items in (texts, locations))
    references = [] if arguments.references is None else _read_texts(arguments.references)
    if names and len(references) != len(texts):
        raise CtxError(
            f"Expected one reference per text, got {len(texts)} texts and {len(references)} references.",
            location=arguments.references,
            hint="use a file with a reference for each line of --input.",
        )
    model, tokenizer = load_model_and_tokenizer(arguments.model, generation_head)
    placement.place(model)
    print_status(f"{type(model).__name__} generates {format_count(len(texts), 'text')}")
    options = arguments.options
    options |= control.options(tokenizer, placement)
    if isinstance(arguments.decoding, SamplingOptions):
        seed_generators(arguments.decoding.seed)
    generated = generate_texts(
        model, tokenizer, texts, locations=locations, control=control.control, progress=True, **options
    )
    generated = [" ".join(text.splitlines()) for text in generated]  # one text per line
    _write(generated, arguments.output_file, shows=not names)
    if names:
        _print_metrics(arguments, names, generated, references, tokenizer)
    output_by_text = dict(zip(texts, generated))
    repeated = repeated_prediction([*output_by_text.values()], [*output_by_text], CONSTANT_SHARE)
    if repeated is not None:
        print_status(
            f"warning: (nearly) all of {len(output_by_text):,} inputs have the output {repeated[:60]!r}; hint: train "
            "the model longer, with a higher --learning_rate or another initializer_range."
        )


def _check_sources(arguments: GenerationArguments, control: ControlArguments, fields: FieldArguments) -> None:
    """Raise CtxError unless there is one source of prompts."""
    if arguments.input is None and control.control is None and not fields.fields:
        raise CtxError("There is no prompt.", location="--input", hint="pass --input, --control or --fields.")
    if fields.fields and arguments.input is not None:
        raise CtxError(
            "The fields of one article and a file were given.", location="--fields, --input", hint="pass one of them."
        )
    if fields.target is not None and (arguments.references is not None or control.control is not None):
        raise CtxError(
            "Fields of articles are generated without --references and --control.",
            location="--target",
            hint="remove these flags.",
        )


def _generate_fields(
    arguments: GenerationArguments, control: ControlArguments, fields: FieldArguments, placement: DeviceArguments
) -> None:
    """Generate a field of one article, or of the articles of a file, and print or write the texts."""
    model, tokenizer = load_model_and_tokenizer(arguments.model, AutoModelForCausalLM.__name__)
    placement.place(model)
    target = str(fields.target)
    names = ("max_new_tokens", "max_length", "batch_size")
    options: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    options |= {"top_p": 1.0, **arguments.decoding_options}
    options |= control.options(tokenizer, placement)
    if isinstance(arguments.decoding, SamplingOptions):
        seed_generators(arguments.decoding.seed)
    if arguments.input is None:
        texts = generate_field(model, tokenizer, fields.values, target, num_texts=arguments.num_texts, **options)
        _write([" ".join(text.splitlines()) for text in texts], arguments.output_file)
        return
    documents = load_documents(arguments.input, news_articles=True)
    articles = [document for document in documents if isinstance(document, NewsArticle)]
    is_for_detection = str(arguments.output_file).endswith(".jsonl")
    if is_for_detection and not (articles := [article for article in articles if article.fields.get(target)]):
        raise CtxError(f"No article has the field {target!r}.", location=arguments.input, hint="use another --target.")
    articles = [article for article in articles for _ in range(arguments.num_texts)]
    article_fields = [article.fields for article in articles]
    locations = [article.location for article in articles]
    texts = generate_fields(model, tokenizer, article_fields, target, locations=locations, progress=True, **options)
    if is_for_detection:
        rows = detection_examples(tokenizer, article_fields, texts, target, arguments.max_new_tokens)
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    else:
        lines = [" ".join(text.splitlines()) for text in texts]
    _write(lines, arguments.output_file)


def _write(lines: list[str], output_file: str | None, shows: bool = True) -> None:
    """Write the lines to a file, or print them."""
    if output_file is not None:
        write_text_file(output_file, "".join(f"{line}\n" for line in lines))
    elif shows:
        print("\n".join(lines))
    print(f"{format_count(len(lines), 'text')} generated" + (f", in {output_file}" if output_file else ""))


def generation_head(config: PreTrainedConfig) -> str:
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
    """The stripped lines of a file; raises CtxError if it has none, or is a table."""
    if (suffix := file_suffix(file)) in (".csv", ".tsv", *RECORD_SUFFIXES):
        raise CtxError(
            f"A {suffix} file is a table; expected a file with one text per line.",
            location=file,
            hint="use `hf-ctxmodels predict`, which reads sources and targets from columns, or write the texts to a "
            ".txt file.",
        )
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
