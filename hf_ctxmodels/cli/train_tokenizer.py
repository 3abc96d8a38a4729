r"""Train the tokenizer of a family on documents, and evaluate it on held-out documents.

    hf-ctxmodels train-tokenizer --family bert --dataset demo --vocab_size 4000 --output_dir tokenizer \
        --options do_lower_case=false
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import yaml
from transformers import PreTrainedTokenizerBase

from hf_ctxmodels.core.console import format_next_commands, print_status, progress_bar
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.languages import split_language_tag
from hf_ctxmodels.core.output_files import TOKENIZER_FILES, check_output_directory
from hf_ctxmodels.data.arguments import DataArguments
from hf_ctxmodels.data.documents import Documents, NoDocumentError, TranslatedText, text_of
from hf_ctxmodels.data.language_sampling import ResampledDocuments
from hf_ctxmodels.registry import FAMILIES, get_family
from hf_ctxmodels.training.recipe import parse_arguments

MAX_EVALUATION_DOCUMENTS = 500  # enough for two significant digits


@dataclass
class TokenizerArguments:
    """Tokenizer."""

    family: str = field(metadata={"help": "Family whose tokenizer is trained.", "choices": sorted(FAMILIES)})
    vocab_size: int = field(metadata={"help": "Vocabulary size, including special tokens."})
    output_dir: str = field(metadata={"help": "Output directory."})
    overwrite: bool = field(default=False, metadata={"help": "Replace the tokenizer in --output_dir."})
    options: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Options of the tokenizer as name=value, such as do_lower_case=false; an unknown name lists them."
        },
    )


class CountedDocuments:
    """Iterable of documents as strings; `count` is the number of documents of the last iteration."""

    def __init__(self, documents: Documents | ResampledDocuments) -> None:
        self.documents = documents
        self.count = 0

    def __iter__(self) -> Iterator[str]:
        self.count = 0
        for text in progress_bar(self.documents.texts(), "reading", unit="documents"):
            self.count += 1
            yield text


def parse_training_options(tokenizer_class: type, assignments: list[str]) -> dict[str, Any]:
    """Parse `["min_frequency=5"]` to `{"min_frequency": 5}`, keyword arguments of the class's `train`.

    Raises:
        CtxError: The tokenizer cannot be trained, an option is unknown, or a value has the wrong type.
    """
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
        options[name] = yaml.safe_load(value)
        expected_type = list if isinstance(defaults[name], tuple) else type(defaults[name])  # YAML has no tuples
        if defaults[name] is not None and type(options[name]) is not expected_type:
            raise CtxError(
                f"The option {name} takes a value like {defaults[name]!r}, not {options[name]!r}.",
                location=f"--options {assignment}",
                hint=f"use a value of type {expected_type.__name__}.",
            )
    return options


def evaluate(tokenizer: PreTrainedTokenizerBase, documents: Documents) -> dict[str, float]:
    """Compute the fertility (tokens per word) and the share of unknown tokens on the first documents."""
    held_out = list(islice(documents, MAX_EVALUATION_DOCUMENTS))
    # translations are skipped: their vocabulary is separate
    texts = [document[0] if isinstance(document, TranslatedText) else text_of(document) for document in held_out]
    texts = ["\n".join(without_tag(line, tokenizer) for line in text.split("\n")) for text in texts]
    encodings = tokenizer(texts, add_special_tokens=False, verbose=False).encodings or []
    encoded = [encoding.ids for encoding in encodings]
    tokens = sum(len(ids) for ids in encoded)
    unknown = sum(ids.count(tokenizer.unk_token_id) for ids in encoded)
    words = sum(len(text.split()) for text in texts)
    return {"documents": len(texts), "fertility": tokens / max(1, words), "unknown": unknown / max(1, tokens)}


def without_tag(line: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The line without its language tag, if the tokenizer has this language and does not tokenize the tag."""
    language, text = split_language_tag(line)
    return text if language in getattr(tokenizer, "languages", ()) else line


def evaluation_lines(tokenizer: PreTrainedTokenizerBase, held_out: Documents | None) -> list[str]:
    """Format the evaluation on the held-out documents, if any."""
    if held_out is None:
        return ["  held out         no document: --validation_fraction is 0"]
    try:
        result = evaluate(tokenizer, held_out)
    except NoDocumentError:
        return ["  held out         no document: the dataset is too small for --validation_fraction"]
    return [
        f"  held out         {result['documents']} documents",
        f"  tokens per word  {result['fertility']:.2f} (held out)",
        f"  unknown tokens   {result['unknown']:.2%} (held out)",
    ]


def main() -> None:
    """Train, evaluate and save the tokenizer."""
    arguments, data = parse_arguments(TokenizerArguments, DataArguments, description=__doc__)
    tokenizer_class: Any = get_family(arguments.family).tokenizer
    check_output_directory(arguments.output_dir, TOKENIZER_FILES, flag="--output_dir", overwrite=arguments.overwrite)
    options = parse_training_options(tokenizer_class, arguments.options)
    training, held_out = data.load()
    texts = CountedDocuments(
        training if data.sampling_alpha is None else ResampledDocuments(training, data.sampling_alpha)
    )
    print_status(f"training a vocabulary of {arguments.vocab_size:,} tokens from {', '.join(data.dataset)}")
    tokenizer = tokenizer_class.train(texts, arguments.vocab_size, **options)
    tokenizer.save_pretrained(arguments.output_dir)

    print(f"{tokenizer_class.__name__} saved in {arguments.output_dir}")
    print(f"  vocabulary       {len(tokenizer)} tokens ({arguments.vocab_size} requested)")
    print(f"  trained on       {texts.count} documents of {', '.join(data.dataset)}")
    print("\n".join(evaluation_lines(tokenizer, held_out)))
    model_flags = ("--family", arguments.family, "--tokenizer", arguments.output_dir)
    print(
        format_next_commands(
            ("pretrain", *model_flags, "--dataset", *data.dataset, "--max_steps", 1000, "--output_dir", "DIR")
        )
    )
