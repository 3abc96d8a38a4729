r"""Train the tokenizer of a family on documents, and evaluate it on held-out documents.

    hf-ctxmodels data tokenizer --family bert --dataset demo --vocab_size 4000 --output_dir tokenizer \
        --options do_lower_case=false

The directory is the --tokenizer of `pretrain`, and of a new model in `finetune`.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

import yaml
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.command_line import parse_arguments, recipe_flags
from hf_ctxmodels.core.console import format_count, format_next_commands, print_status, progress_bar
from hf_ctxmodels.core.errors import CtxError, wrap_errors
from hf_ctxmodels.core.flags import REQUIRED, check_range, field_default, flag
from hf_ctxmodels.core.generation import split_language_tag
from hf_ctxmodels.core.output_files import TOKENIZER_FILES, check_output_directory, replacing_files
from hf_ctxmodels.data.document_sources import DataArguments
from hf_ctxmodels.data.documents import (
    Documents,
    DocumentTexts,
    NoDocumentError,
    SampledDocuments,
    TranslatedText,
    text_of,
)
from hf_ctxmodels.data.training_set import ResampledDocuments
from hf_ctxmodels.registry import FAMILIES, get_family

MAX_EVALUATION_DOCUMENTS = 500  # enough for two significant digits


@dataclass
class TokenizerArguments:
    """Tokenizer."""

    family: str = flag(REQUIRED, "Family whose tokenizer is trained.", choices=sorted(FAMILIES))
    vocab_size: int = flag(REQUIRED, "Vocabulary size, including special tokens.")
    output_dir: str = flag(REQUIRED, "Output directory.")
    overwrite: bool = flag(False, "Replace the tokenizer in --output_dir.")
    sample_bytes: int | None = flag(
        None, "Train on a random sample of documents of about this size, spread over the dataset; by default all."
    )
    options: list[str] = flag(
        (), "Options of the tokenizer as name=value, such as do_lower_case=false; an unknown name lists them."
    )


def parse_training_options(tokenizer_class: type, assignments: list[str]) -> dict[str, Any]:
    """Parse `["min_frequency=5"]` to `{"min_frequency": 5}`, keyword arguments of the class's `train`; raises CtxError
    if the tokenizer cannot be trained, or an option is unknown or has the wrong type."""
    if not hasattr(tokenizer_class, "train"):
        raise CtxError(f"{tokenizer_class.__name__} cannot be trained.", hint="load it with AutoTokenizer instead.")
    defaults: dict[str, Any] = {}
    for base_class in tokenizer_class.__mro__:  # `train` may pass **kwargs to the base class
        if "train" in vars(base_class):
            parameters = inspect.signature(vars(base_class)["train"].__func__).parameters.values()
            defaults = {
                parameter.name: parameter.default
                for parameter in parameters
                if parameter.kind is inspect.Parameter.KEYWORD_ONLY
            } | defaults
            if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
                break
    options = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or name not in defaults:
            raise CtxError(
                f"{tokenizer_class.__name__} has no option {name!r}.",
                location=f"--options {assignment}",
                hint=f"use one or more of: {', '.join(f'{key}={default}' for key, default in defaults.items())}.",
            )
        with wrap_errors(
            "Not a YAML value", location=f"--options {assignment}", hint=f"use a value like {defaults[name]!r}."
        ):
            options[name] = yaml.safe_load(value)
        expected_type = list if isinstance(defaults[name], tuple) else type(defaults[name])  # YAML has no tuples
        if expected_type is float and type(options[name]) is int:
            options[name] = float(options[name])
        if defaults[name] is not None and type(options[name]) is not expected_type:
            raise CtxError(
                f"The option {name} takes a value like {defaults[name]!r}, not {options[name]!r}.",
                location=f"--options {assignment}",
                hint=f"use a value of type {expected_type.__name__}.",
            )
    return options


def evaluate(tokenizer: PreTrainedTokenizerBase, documents: Documents, language: str | None = None) -> dict[str, float]:
    """Compute the fertility (tokens per word) and the share of unknown tokens on the first documents; `language` is
    the language of lines without a tag, for a tokenizer whose tokens depend on the language."""
    held_out = list(islice(documents, MAX_EVALUATION_DOCUMENTS))
    languages, by_language = getattr(tokenizer, "languages", ()), getattr(tokenizer, "tokens_depend_on_language", False)
    texts: dict[str | None, list[str]] = {}
    for document in held_out:
        # translations are skipped: their vocabulary is separate
        lines = (document[0] if isinstance(document, TranslatedText) else text_of(document)).split("\n")
        # tags are removed if the tokenizer has their language and does not tokenize them
        split_lines = ((line, *split_language_tag(line)) for line in lines)
        tagged_lines = [(tag, text) if tag in languages else (None, line) for line, tag, text in split_lines]
        if by_language:
            for tag, text in tagged_lines:
                texts.setdefault(tag or language, []).append(text)
        else:
            texts.setdefault(None, []).append("\n".join(text for _, text in tagged_lines))
    encodings: list[Encoding] = []
    for name, language_texts in texts.items():
        arguments = {} if name is None else {"language": name}
        encodings += tokenizer(language_texts, add_special_tokens=False, verbose=False, **arguments).encodings or []
    tokens = sum(len(encoding.ids) for encoding in encodings)
    unknown = sum(encoding.ids.count(tokenizer.unk_token_id) for encoding in encodings)
    words = sum(len(text.split()) for language_texts in texts.values() for text in language_texts)
    return {"documents": len(held_out), "fertility": tokens / max(1, words), "unknown": unknown / max(1, tokens)}


def main() -> None:
    """Train, evaluate and save the tokenizer."""
    arguments, data = parse_arguments(TokenizerArguments, DataArguments, description=__doc__)
    tokenizer_class: Any = get_family(arguments.family).tokenizer
    check_output_directory(arguments.output_dir, TOKENIZER_FILES, flag="--output_dir", overwrite=arguments.overwrite)
    options = parse_training_options(tokenizer_class, arguments.options)
    training, held_out = data.load()
    check_range(arguments, "sample_bytes", at_least=1)
    sample = training if arguments.sample_bytes is None else SampledDocuments(training, arguments.sample_bytes)
    sampled = sample if data.sampling_alpha is None else ResampledDocuments(sample, data.sampling_alpha)
    num_documents = 0

    class Texts:
        """The documents as strings; a trainer may iterate several times."""

        def __iter__(self) -> Iterator[str]:
            nonlocal num_documents
            num_documents = 0
            for text in progress_bar(DocumentTexts(sampled), "reading", unit="documents"):
                num_documents += 1
                yield text

    print_status(f"training a vocabulary of {arguments.vocab_size:,} tokens from {', '.join(data.dataset)}")
    tokenizer = tokenizer_class.train(Texts(), arguments.vocab_size, **options)
    with replacing_files(arguments.output_dir, TOKENIZER_FILES) as folder:
        tokenizer.save_pretrained(folder)

    print(f"{tokenizer_class.__name__} saved in {arguments.output_dir}")
    print(f"  vocabulary       {len(tokenizer)} tokens ({arguments.vocab_size} requested)")
    print(f"  trained on       {format_count(num_documents, 'document')} of {', '.join(data.dataset)}")
    try:
        if held_out is None:
            print("  held out         no document: --validation_fraction is 0")
        else:
            result = evaluate(tokenizer, held_out, options.get("language") or None)
            print(f"  held out         {result['documents']} documents")
            print(f"  tokens per word  {result['fertility']:.2f} (held out)")
            print(f"  unknown tokens   {result['unknown']:.2%} (held out)")
    except NoDocumentError:
        print("  held out         no document: the dataset is too small for --validation_fraction")
    print(format_next_commands(next_command(arguments, data)))


def next_command(arguments: TokenizerArguments, data: DataArguments) -> tuple[Any, ...]:
    """The command that trains a model with the tokenizer: `pretrain`, or `finetune` for a family without a pretraining
    objective."""
    if not FAMILIES[arguments.family].objectives:
        finetune = ("finetune", "sequence-classification", "--family")
        files = ("--train_file", "FILE", "--validation_file", "FILE")
        return (*finetune, f"{arguments.family}:tokenizer={arguments.output_dir}", *files, "--output_dir", "DIR")
    changed = {
        entry.name: value
        for entry in fields(data)
        if (value := getattr(data, entry.name)) not in (field_default(entry), [], ())
    }
    flags = recipe_flags(changed, changed, "")
    model = ("--family", arguments.family, "--tokenizer", arguments.output_dir)
    return ("pretrain", *model, *flags, "--max_steps", 1000, "--output_dir", "DIR")
