"""Text from text: what an encoder-decoder writes for a source, or a decoder after a prompt."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.console import progress_bar
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.generation import check_can_generate, decode_generated, max_input_length, max_pair_length
from hf_ctxmodels.core.languages import LanguagePair, target_language_id
from hf_ctxmodels.core.model_modes import evaluation_mode
from hf_ctxmodels.data.padding import RowPadder
from hf_ctxmodels.layers.cpu.linear import prepacked_weights
from hf_ctxmodels.objectives.base import check_at_least


def generate_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    max_new_tokens: int = 60,
    max_length: int | None = None,
    batch_size: int = 64,
    language: str | None = None,
    source_language: str | None = None,
    progress: bool = False,
    **options: Any,
) -> list[str]:
    """What the model writes for each text.

    Without `do_sample` it does not depend on the other texts. A sample depends on torch's seed, the texts and the batch
    size.

    Args:
        model: An encoder-decoder (`AutoModelForSeq2SeqLM`), which reads the text and writes another one, or a decoder
            (`AutoModelForCausalLM`), which continues it; the continuation is returned.
        tokenizer: Its tokenizer.
        texts: Sources or prompts.
        max_new_tokens: Longest written text in tokens.
        max_length: Texts are cut to so many tokens, sources at their end and prompts at their beginning; None for an
            error for texts over the model's limit.
        batch_size: Texts per batch; texts of similar length are batched.
        language: The language to write: one of `tokenizer.languages`, None for the first or only one; where the model
            has embeddings of languages, one of `config.lang2id`.
        source_language: With such embeddings, the language of the texts; None for that of `config.default_lang`.
        progress: Whether to show a bar.
        options: Arguments of `generate`, such as `num_beams` and `length_penalty`; greedy by default.

    Raises:
        CtxError: The model does not write text, or not this language, or must be told one; a text has no token, or too
            many for the model; a number is too small, or several texts are asked for of one.
    """
    check_can_generate(model)
    _check_numbers(max_new_tokens, max_length, batch_size, options)
    names = LanguagePair.of(model.config, source_language, language, ("--source_language", "--language"))
    told = {} if names is None else names.tokenizer_arguments(tokenizer, names.source)
    numbers = _language_numbers(model, tokenizer, names, language, source_language)
    rows = _encode(model, tokenizer, texts, max_length, told)
    _check_rows(model, tokenizer, texts, rows, max_new_tokens)
    settings = {"do_sample": False, "max_new_tokens": max_new_tokens, **options}
    if not _has_encoder(model) and model.generation_config.pad_token_id is None:
        settings.setdefault("pad_token_id", _padding(tokenizer))
    order = sorted(range(len(texts)), key=lambda place: len(rows[place]))
    found: dict[int, str] = {}
    with evaluation_mode(model), prepacked_weights(getattr(model, "prepacked_bytes", 0)):
        for first in progress_bar(range(0, len(order), batch_size), "generating", unit="batches", enabled=progress):
            places = order[first : first + batch_size]
            batch = _batch(model, tokenizer, [rows[place] for place in places], numbers)
            written = model.generate(**batch, **settings)
            if not _has_encoder(model):
                written = written[:, batch["input_ids"].shape[1] :]
            found |= dict(zip(places, decode_generated(tokenizer, written.tolist()), strict=True))
    return [found[place] for place in range(len(texts))]


def _check_numbers(new: int, max_length: int | None, batch_size: int, options: dict[str, Any]) -> None:
    """Raise CtxError for a number that `generate` cannot work with, or does not say here what it says there."""
    numbers = {"max_new_tokens": new, "batch_size": batch_size, "max_length": max_length}
    numbers["num_beams"] = options.get("num_beams")
    check_at_least(1, **{name: value for name, value in numbers.items() if value is not None})
    if (count := options.get("num_return_sequences") or 1) != 1:
        raise CtxError(
            f"num_return_sequences={count}, but one text is written for each.",
            hint="give each text so many times, or call model.generate, which returns ids.",
        )


def _language_numbers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    names: LanguagePair | None,
    language: str | None,
    source_language: str | None,
) -> dict[str, int]:
    """The number of the language that each argument of `generate` holds, by its name.

    Raises:
        CtxError: The model does not know a language that is given.
    """
    if names is not None:
        columns = ("langs", "decoder_langs") if _has_encoder(model) else ("langs",)
        return dict(zip(columns, names.numbers, strict=False))
    if source_language is not None:
        raise CtxError(
            "The model is not told the language of its texts.",
            location=f"--source_language {source_language}",
            hint="leave it out.",
        )
    number = target_language_id(tokenizer, language, model.config)
    return {} if number is None else {"target_languages": number}


def _has_encoder(model: PreTrainedModel) -> bool:
    """Whether what it writes is a text of its own, and not the continuation of what it reads."""
    return bool(model.config.is_encoder_decoder)


def _encode(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    max_length: int | None,
    told: dict[str, str],
) -> list[list[int]]:
    """The ids of each text; those of a prompt without the tokens that end a text. `told` are further keywords."""
    if _has_encoder(model):
        cut = {} if max_length is None else {"truncation": True, "max_length": max_length}
        return tokenizer(list(texts), verbose=False, **cut, **told)["input_ids"]
    encoded = tokenizer(list(texts), verbose=False, return_special_tokens_mask=True, **told)
    rows = []
    for ids, special in zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True):
        end = len(ids) - next((place for place, each in enumerate(reversed(special)) if not each), len(ids))
        rows.append(ids[:end] if max_length is None else ids[:end][-max_length:])
    return rows


def _check_rows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], rows: list[list[int]], new: int
) -> None:
    """Raise CtxError for a text without a token, or one that with its continuation is longer than the model reads."""
    special, limit, pair = (
        len(tokenizer("")["input_ids"]),
        max_input_length(model.config),
        max_pair_length(model.config),
    )
    limit = limit if pair is None else pair
    if limit is not None and new > limit:
        raise CtxError(
            f"{new} new tokens are over the model's limit of {limit} positions.",
            location=f"--max_new_tokens {new}",
            hint=f"use {limit} or fewer (max_new_tokens).",
        )
    room = limit if limit is None or (_has_encoder(model) and pair is None) else limit - new
    for number, (text, row) in enumerate(zip(texts, rows, strict=True)):
        if len(row) <= (special if _has_encoder(model) else 0) or not text.strip():
            raise CtxError(f"Text {number} (counted from 0) has no words: {text!r}.", hint="remove it.")
        if room is not None and len(row) > room:
            raise CtxError(
                f"Text {number} (counted from 0) has {len(row)} tokens; the model reads {limit}"
                + ("." if room == limit else f", of which it writes {new}."),
                location=f"{text[:60]!r}",
                hint="shorten it, or cut all texts: --max_length (max_length)"
                + ("." if room == limit else f", at most {room}; or write fewer tokens: --max_new_tokens."),
            )


def _padding(tokenizer: PreTrainedTokenizerBase) -> int:
    """A token for places that no model looks at."""
    return next((each for each in (tokenizer.pad_token_id, tokenizer.eos_token_id) if each is not None), 0)


def _batch(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: list[list[int]], languages: dict[str, int]
) -> dict[str, torch.Tensor]:
    """Padded rows; prompts are padded on the left, so that each is followed by its continuation.

    Args:
        model, tokenizer: As in `generate_texts`.
        rows: Ids.
        languages: See `_language_numbers`.
    """
    padder = RowPadder([len(row) for row in rows], tokenizer.padding_side if _has_encoder(model) else "left")
    ids = padder.pad([np.asarray(row) for row in rows], _padding(tokenizer))
    batch = {"input_ids": ids, "attention_mask": padder.attention_mask()}
    shapes = {"langs": tuple(ids.shape), "decoder_langs": (len(rows), 1), "target_languages": (len(rows),)}
    batch |= {name: torch.full(shapes[name], number) for name, number in languages.items()}
    return {name: tensor.to(model.device) for name, tensor in batch.items()}
