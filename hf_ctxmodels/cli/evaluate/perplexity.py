r"""Compute the perplexity of a causal language model on a text, per token and per word, with a sliding window.

hf-ctxmodels evaluate perplexity --model runs/gpt2 --dataset 'corpus/test*.txt' --stride 256
"""

from dataclasses import dataclass, field

from hf_ctxmodels.core.flags import flag
from hf_ctxmodels.data.document_sources import load_documents
from hf_ctxmodels.downstream.loading_with_adapters import load_model_with_adapters
from hf_ctxmodels.evaluation.perplexity import measure_perplexity
from hf_ctxmodels.tokenizers.base import check_tokenizer_matches_model
from hf_ctxmodels.training.model_loading import load_config, load_tokenizer
from hf_ctxmodels.training.recipe import parse_arguments


@dataclass
class PerplexityArguments:
    """Model and text."""

    model: str = field(metadata={"help": "Checkpoint directory or Hub id of a causal language model, or XLNet."})
    dataset: list[str] = field(
        metadata={
            "help": "demo, a .txt, .jsonl or .parquet file or a pattern of files, or a Hub id; or several of these."
        }
    )
    split: str = flag("test", "Split of a Hub dataset.")
    validation_fraction: float | None = flag(
        None, "Use only the validation documents of pretrain with this fraction and the same files."
    )
    max_length: int | None = flag(None, "Window length in tokens; by default the maximum length of the model.")
    stride: int | None = flag(None, "Stride of the windows in tokens; by default half a window.")
    batch_size: int = flag(8, "Windows per batch.")


def main() -> None:
    """Evaluate, and print one line."""
    (arguments,) = parse_arguments(PerplexityArguments, description=__doc__)
    config, tokenizer = load_config(arguments.model), load_tokenizer(arguments.model)
    check_tokenizer_matches_model(tokenizer, config, location=arguments.model)
    model = load_model_with_adapters(arguments.model, "AutoModelForCausalLM", config)
    documents = load_documents(*arguments.dataset, split=arguments.split, skip_empty=True)
    if arguments.validation_fraction is not None:
        documents = documents.split(arguments.validation_fraction)[1]
    # sentences are joined by spaces, as in causal language modelling
    windows = {name: getattr(arguments, name) for name in ("max_length", "stride", "batch_size")}
    result = measure_perplexity(model, tokenizer, map(" ".join, documents), **windows)
    print(
        f"perplexity {result.per_token:.3f} per token, {result.per_word:.3f} per word; {result.tokens:,} tokens, "
        f"{result.words:,} words, {result.unknown:,} unknown tokens, {result.nats / result.tokens:.4f} nats per token"
    )
