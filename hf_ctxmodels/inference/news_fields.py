"""Fields of a news article, written and scored by Grover given other fields (Zellers et al. 2019, section 3.1)."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.constants import IGNORE_INDEX, NEWS_FIELDS
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.model_modes import evaluation_mode
from hf_ctxmodels.data.news_files import format_field
from hf_ctxmodels.evaluation.next_token_loss import sum_next_token_loss


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
    """Write a field of an article, given any of the others.

    The context is the given fields in the order of `NEWS_FIELDS` and the token that begins the target; the token that
    ends it ends the text. No other special token is written.

    Args:
        model: A Grover language model.
        tokenizer: Its tokenizer.
        fields: Field -> value as in a file of articles, see `data.news_files.read_articles`; none are needed. That of the
            target is not used.
        target: The field to write.
        top_p: Sample from the most probable tokens with this share of the probability; 1.0 samples from all. The token
            that reaches the share is kept, as in transformers; the released code leaves it out.
        num_texts: Number of texts.
        max_new_tokens: Longest text in tokens; None for what the model's positions leave.
        options: Other arguments of `generate`, such as `do_sample=False`.

    Raises:
        CtxError: A field is unknown or of a wrong type, the context leaves no room for the target, or the tokenizer has
            no field tokens.
    """
    if not hasattr(tokenizer, "encode_fields"):
        raise CtxError(f"{type(tokenizer).__name__} has no tokens of fields.", hint="use Grover and its tokenizer.")
    _, end = tokenizer.field_ids(target)
    for field in fields:
        tokenizer.field_ids(field)
    texts = {field: format_field(field, fields.get(field)) for field in NEWS_FIELDS if field != target}
    context = tokenizer.encode_fields(texts, target)
    room = _room(context, target, model.config.max_sequence_length)
    banned = sorted({*tokenizer.all_special_ids, tokenizer.pad_token_id} - {end})
    ids = torch.tensor([context], device=model.device)
    settings: dict[str, Any] = {
        "do_sample": True,
        "top_p": top_p,
        "top_k": 0,
        "num_return_sequences": num_texts,
        "max_new_tokens": room if max_new_tokens is None else min(room, max_new_tokens),
        "eos_token_id": end,
        "pad_token_id": tokenizer.pad_token_id,
        "suppress_tokens": banned,
    }
    with evaluation_mode(model):
        written = model.generate(ids, attention_mask=torch.ones_like(ids), **settings | options)
    return [tokenizer.decode(row, skip_special_tokens=True).strip() for row in written[:, len(context) :].tolist()]


def _room(context: list[int], target: str, limit: int) -> int:
    """How many tokens the target may have."""
    if len(context) >= limit:
        raise CtxError(
            f"The other fields have {len(context)} tokens with that which begins {target!r}; the model reads {limit}.",
            hint="leave a field out, or shorten it.",
        )
    return limit - len(context)


def field_loss(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    articles: Iterable[Mapping[str, str]],
    target: str,
    given: Collection[str] = NEWS_FIELDS,
    *,
    batch_size: int = 16,
) -> float:
    """The mean loss in nats per token of a field and the token that ends it, given other fields before it.

    Articles without the target are passed over, and what is beyond the model's longest sequence is not counted.

    Args:
        model: A Grover language model.
        tokenizer: Its tokenizer.
        articles: Field -> text of each, as `NewsArticle.fields`.
        target: The field that is predicted.
        given: The fields that stand before it, where an article has them; () for none.
        batch_size: Articles at a time.

    Raises:
        CtxError: A field is unknown, or no article has the target within the model's longest sequence.
    """
    limit, rows = model.config.max_sequence_length, []
    for fields in articles:
        if fields.get(target):
            context = tokenizer.encode_fields({name: fields[name] for name in given if name in fields}, target)
            ids = [*context, *tokenizer.encode_text(fields[target]), tokenizer.field_ids(target)[1]][: limit + 1]
            targets = torch.tensor(ids[1:])
            targets[: len(context) - 1] = IGNORE_INDEX
            if len(ids) > len(context):
                rows.append((torch.tensor(ids[:-1]), targets))
    if not rows:
        raise CtxError(f"No article has the field {target!r} within {limit} tokens.", hint="give others.")
    rows.sort(key=lambda row: len(row[0]))
    nats, tokens = sum_next_token_loss(model, rows, batch_size=batch_size, padding=tokenizer.pad_token_id)
    return nats / tokens
