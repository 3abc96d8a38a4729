"""Generation and scoring of the fields of a news article with Grover (Zellers et al. 2019, section 3.1)."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.console import progress_bar
from hf_ctxmodels.core.constants import IGNORE_INDEX, NEWS_FIELDS
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range
from hf_ctxmodels.core.model import evaluation_mode
from hf_ctxmodels.data.news_files import format_field
from hf_ctxmodels.data.padding import batches_by_length
from hf_ctxmodels.evaluation.perplexity import sum_next_token_loss
from hf_ctxmodels.inference.generation import make_generation_batch


def generate_field(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    fields: Mapping[str, Any],
    target: str,
    *,
    num_texts: int = 1,
    **options: Any,
) -> list[str]:
    """Generate texts of a field of an article, conditioned on any other fields in the order of `NEWS_FIELDS`.

    Args:
        model, tokenizer: A Grover language model and its tokenizer.
        fields: Field -> value in the format of `data.news_files.read_articles`; the target's value is ignored.
        options: Other arguments of `generate_fields`.

    Raises:
        CtxError: A field is unknown or of a wrong type, the context is too long, or the tokenizer has no field tokens.
    """
    _require_field_tokens(tokenizer)
    for field in fields:
        tokenizer.field_ids(field)
    texts = {field: format_field(field, fields.get(field)) for field in NEWS_FIELDS if field != target}
    return generate_fields(model, tokenizer, [texts] * num_texts, target, **options)


def generate_fields(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    articles: Sequence[Mapping[str, str]],
    target: str,
    *,
    locations: Sequence[object] = (),
    top_p: float = 0.95,
    max_new_tokens: int | None = None,
    max_length: int | None = None,
    batch_size: int = 32,
    progress: bool = False,
    **options: Any,
) -> list[str]:
    """Generate a field of each article, conditioned on its other fields in the order of `NEWS_FIELDS`.

    Args:
        model, tokenizer: A Grover language model and its tokenizer.
        articles: Field -> text of each article, as in `NewsArticle.fields`; the target's text is ignored.
        locations: `NewsArticle.location` of each article, for errors.
        top_p: Nucleus sampling probability; 1.0 samples from all tokens. The token that crosses the threshold is kept,
            as in transformers; the released code drops it.
        max_new_tokens: Tokens of the longest text; None for the longest one that the model's positions allow.
        max_length: Truncate contexts at their beginning to this number of tokens; None raises an error for contexts
            over the model's limit.
        batch_size: Articles per batch; articles of similar length are batched.
        options: Other arguments of `generate`, such as `do_sample=False`.

    Raises:
        CtxError: A field is unknown, a context is too long, or the tokenizer has no field tokens.
    """
    _require_field_tokens(tokenizer)
    _, end_id = tokenizer.field_ids(target)
    limit = model.config.max_sequence_length
    check_range({"max_length": max_length}, at_least=1)
    contexts = [tokenizer.encode_fields(fields, target) for fields in articles]
    if max_length is not None:
        contexts = [ids[-max_length:] for ids in contexts]
    for index, ids in enumerate(contexts):
        if len(ids) >= limit:
            raise CtxError(
                f"The context of {target!r} has {len(ids)} tokens; the model has {limit} positions for the context and "
                "the generated tokens.",
                location=locations[index] if locations else None,
                hint=f"remove or shorten a field, or truncate all contexts with a --max_length of at most {limit - 1}.",
            )
    settings: dict[str, Any] = {
        "do_sample": True,
        "eos_token_id": end_id,
        "pad_token_id": tokenizer.pad_token_id,
        "suppress_tokens": sorted({*tokenizer.all_special_ids, tokenizer.pad_token_id} - {end_id}),
    }
    if options.get("do_sample", True):
        settings |= {"top_p": top_p, "top_k": 0}
    generated: dict[int, str] = {}
    batches = batches_by_length([*map(len, contexts)], batch_size)
    with evaluation_mode(model):
        for indices in progress_bar(batches, "generating", unit="batches", enabled=progress):
            batch = make_generation_batch(model, tokenizer, [contexts[index] for index in indices], language_ids={})
            context_length = batch["input_ids"].shape[1]
            max_tokens = limit - context_length
            settings["max_new_tokens"] = max_tokens if max_new_tokens is None else min(max_tokens, max_new_tokens)
            sequences = model.generate(**batch, **settings | options)[:, context_length:]
            texts = (tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in sequences.tolist())
            generated |= dict(zip(indices, texts, strict=True))
    return [generated[index] for index in range(len(contexts))]


def detection_examples(
    tokenizer: PreTrainedTokenizerBase,
    articles: Sequence[Mapping[str, str]],
    generated: Sequence[str],
    target: str,
    max_tokens: int,
) -> list[dict[str, str]]:
    """Two examples of each article for a detector of generated text: its own text of a field, with the label `human`,
    and the generated one, with the label `generated`.

    The columns are the `text` of the field, of at most `max_tokens` tokens; all fields with their begin and end tokens
    as `marked_text`, which Grover's tokenizer reads as it reads articles in pretraining; and the `label` (Zellers et
    al. 2019, section 5).
    """
    rows = []
    for fields, generated_text in zip(articles, generated, strict=True):
        human_text = tokenizer.decode(tokenizer.encode_text(fields[target])[:max_tokens]).strip()
        for text, label in ((human_text, "human"), (generated_text, "generated")):
            marked_text = tokenizer.decode(tokenizer.encode_fields({**fields, target: text}))
            rows.append({"text": text, "marked_text": marked_text, "label": label})
    return rows


def _require_field_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    if not hasattr(tokenizer, "encode_fields"):
        raise CtxError(f"{type(tokenizer).__name__} has no field tokens.", hint="use Grover and its tokenizer.")


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
