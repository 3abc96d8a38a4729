"""Generation and scoring of the fields of a news article with Grover (Zellers et al. 2019, section 3.1)."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.constants import IGNORE_INDEX, NEWS_FIELDS
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model import evaluation_mode
from hf_ctxmodels.data.news_files import format_field
from hf_ctxmodels.evaluation.perplexity import sum_next_token_loss


def generate_field(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    fields: Mapping[str, Any],
    target: str,
    *,
    top_p: float = 0.95,
    num_texts: int = 1,
    max_new_tokens: int | None = None,
    **options: Any,
) -> list[str]:
    """Generate a field of an article, conditioned on any other fields in the order of `NEWS_FIELDS`.

    Args:
        model, tokenizer: A Grover language model and its tokenizer.
        fields: Field -> value in the format of `data.news_files.read_articles`; the target's value is ignored.
        top_p: Nucleus sampling probability; 1.0 samples from all tokens. The token that crosses the threshold is kept,
            as in transformers; the released code drops it.
        max_new_tokens: Tokens of the longest text; None for the longest one that the model's positions allow.
        options: Other arguments of `generate`, such as `do_sample=False`.

    Raises:
        CtxError: A field is unknown or of a wrong type, the context is too long, or the tokenizer has no field tokens.
    """
    if not hasattr(tokenizer, "encode_fields"):
        raise CtxError(f"{type(tokenizer).__name__} has no field tokens.", hint="use Grover and its tokenizer.")
    _, end_id = tokenizer.field_ids(target)
    for field in fields:
        tokenizer.field_ids(field)
    texts = {field: format_field(field, fields.get(field)) for field in NEWS_FIELDS if field != target}
    context = tokenizer.encode_fields(texts, target)
    max_tokens = model.config.max_sequence_length - len(context)
    if max_tokens <= 0:
        raise CtxError(
            f"The context of {target!r} has {len(context)} tokens; the model's longest input has "
            f"{model.config.max_sequence_length}.",
            hint="remove or shorten a field.",
        )
    input_ids = torch.tensor([context], device=model.device)
    settings: dict[str, Any] = {
        "do_sample": True,
        "top_p": top_p,
        "top_k": 0,
        "num_return_sequences": num_texts,
        "max_new_tokens": max_tokens if max_new_tokens is None else min(max_tokens, max_new_tokens),
        "eos_token_id": end_id,
        "pad_token_id": tokenizer.pad_token_id,
        "suppress_tokens": sorted({*tokenizer.all_special_ids, tokenizer.pad_token_id} - {end_id}),
    }
    with evaluation_mode(model):
        generated = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **settings | options)
    continuations = generated[:, len(context) :].tolist()
    return [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in continuations]


def field_loss(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    articles: Iterable[Mapping[str, str]],
    target: str,
    context_fields: Collection[str] = NEWS_FIELDS,
    *,
    batch_size: int = 16,
) -> float:
    """Mean cross-entropy (nats per token) of a field and its end token, conditioned on other fields.

    Articles without the target are skipped; tokens beyond the model's longest input are ignored.

    Args:
        model, tokenizer: A Grover language model and its tokenizer.
        articles: Field -> text of each article, as in `NewsArticle.fields`.
        context_fields: Fields of the context, if an article has them; () for none.

    Raises:
        CtxError: A field is unknown, or no article has the target within the model's longest input.
    """
    limit, sequences = model.config.max_sequence_length, []
    for fields in articles:
        if fields.get(target):
            context = tokenizer.encode_fields({name: fields[name] for name in context_fields if name in fields}, target)
            ids = [*context, *tokenizer.encode_text(fields[target]), tokenizer.field_ids(target)[1]][: limit + 1]
            targets = torch.tensor(ids[1:])
            targets[: len(context) - 1] = IGNORE_INDEX
            if len(ids) > len(context):
                sequences.append((torch.tensor(ids[:-1]), targets))
    if not sequences:
        raise CtxError(
            f"No article has the field {target!r} within {limit} tokens.",
            hint="use articles with this field, or fewer context fields.",
        )
    sequences.sort(key=lambda sequence: len(sequence[0]))
    nats, tokens = sum_next_token_loss(model, sequences, batch_size=batch_size, padding=tokenizer.pad_token_id)
    return nats / tokens
