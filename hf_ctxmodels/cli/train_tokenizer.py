r"""Train the tokenizer of any family on documents, and say how well it fits documents it has not seen.

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

HELD_OUT_DOCUMENTS = 500  # enough for rates of two digits


@dataclass
class TokenizerArguments:
    """Tokenizer."""

    family: str = field(metadata={"help": "Family whose tokenizer is trained.", "choices": sorted(FAMILIES)})
    vocab_size: int = field(metadata={"help": "Vocabulary size, with special tokens."})
    output_dir: str = field(metadata={"help": "Output directory."})
    overwrite: bool = field(default=False, metadata={"help": "Replace the tokenizer in --output_dir."})
    options: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Options of the tokenizer as name=value, such as do_lower_case=false; an unknown name lists all."
        },
    )


class CountedTexts:
    """Texts of documents; `count` says how many the last iteration gave."""

    def __init__(self, documents: Documents | ResampledDocuments) -> None:
        self.documents = documents
        self.count = 0

    def __iter__(self) -> Iterator[str]:
        self.count = 0
        for text in progress_bar(self.documents.texts(), "reading", unit="documents"):
            self.count += 1
            yield text


def training_options(tokenizer_class: type, pairs: list[str]) -> dict[str, Any]:
    """`["min_frequency=5"]` -> `{"min_frequency": 5}`, checked against what the class's `train` takes."""
    if not hasattr(tokenizer_class, "train"):
        raise CtxError(f"{tokenizer_class.__name__} cannot be trained.", hint="load it with AutoTokenizer instead.")
    defaults: dict[str, Any] = {}
    for kind in tokenizer_class.__mro__:  # a class may hand on what it does not name itself
        if "train" in vars(kind):
            parameters = inspect.signature(vars(kind)["train"].__func__).parameters.values()
            defaults = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY} | defaults
            if not any(each.kind is each.VAR_KEYWORD for each in parameters):
                break
    options = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or name not in defaults:
            raise CtxError(
                f"No such option of {tokenizer_class.__name__}.",
                location=f"--options {pair}",
                hint=f"use some of: {', '.join(f'{known}={default}' for known, default in defaults.items())}.",
            )
        options[name] = yaml.safe_load(value)
        kind = list if isinstance(defaults[name], tuple) else type(defaults[name])  # YAML has no tuples
        if defaults[name] is not None and type(options[name]) is not kind:
            raise CtxError(
                f"The option {name} takes a value like {defaults[name]!r}, not {options[name]!r}.",
                location=f"--options {pair}",
                hint="give a value of that kind.",
            )
    return options


def fit(tokenizer: PreTrainedTokenizerBase, documents: Documents) -> dict[str, float]:
    """Tokens per word (fertility) and the share of unknown tokens on some documents."""
    held_out = list(islice(documents, HELD_OUT_DOCUMENTS))
    # the other language's words are none of these
    texts = [each[0] if isinstance(each, TranslatedText) else text_of(each) for each in held_out]
    texts = ["\n".join(without_tag(line, tokenizer) for line in text.split("\n")) for text in texts]
    encodings = tokenizer(texts, add_special_tokens=False, verbose=False).encodings or []
    encoded = [encoding.ids for encoding in encodings]
    tokens = sum(len(ids) for ids in encoded)
    unknown = sum(ids.count(tokenizer.unk_token_id) for ids in encoded)
    words = sum(len(text.split()) for text in texts)
    return {"documents": len(texts), "fertility": tokens / max(1, words), "unknown": unknown / max(1, tokens)}


def without_tag(line: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """A line without the tag of a language that the tokenizer knows by name, and so does not read as text."""
    language, text = split_language_tag(line)
    return text if language in getattr(tokenizer, "languages", ()) else line


def fit_lines(tokenizer: PreTrainedTokenizerBase, held_out: Documents | None) -> list[str]:
    """What is printed of the fit to held-out documents, None for none."""
    if held_out is None:
        return ["  held out         no document: --validation_fraction is 0"]
    try:
        result = fit(tokenizer, held_out)
    except NoDocumentError:
        return ["  held out         no document: the data set is too small for --validation_fraction"]
    return [
        f"  held out         {result['documents']} documents",
        f"  tokens per word  {result['fertility']:.2f} (held out)",
        f"  unknown tokens   {result['unknown']:.2%} (held out)",
    ]


def main() -> None:
    """Parse, train, save, print."""
    arguments, data = parse_arguments(TokenizerArguments, DataArguments, description=__doc__)
    tokenizer_class: Any = get_family(arguments.family).tokenizer
    check_output_directory(arguments.output_dir, TOKENIZER_FILES, flag="--output_dir", overwrite=arguments.overwrite)
    options = training_options(tokenizer_class, arguments.options)
    training, held_out = data.load()
    texts = CountedTexts(training if data.sampling_alpha is None else ResampledDocuments(training, data.sampling_alpha))
    print_status(f"learning a vocabulary of {arguments.vocab_size:,} tokens from {', '.join(data.dataset)}")
    tokenizer = tokenizer_class.train(texts, arguments.vocab_size, **options)
    tokenizer.save_pretrained(arguments.output_dir)

    print(f"{tokenizer_class.__name__} saved in {arguments.output_dir}")
    print(f"  vocabulary       {len(tokenizer)} tokens of {arguments.vocab_size} asked for")
    print(f"  trained on       {texts.count} documents of {', '.join(data.dataset)}")
    print("\n".join(fit_lines(tokenizer, held_out)))
    place = ("--family", arguments.family, "--tokenizer", arguments.output_dir)
    print(
        format_next_commands(
            ("pretrain", *place, "--dataset", *data.dataset, "--max_steps", 1000, "--output_dir", "DIR")
        )
    )
