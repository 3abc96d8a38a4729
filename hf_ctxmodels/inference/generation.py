"""Batched text generation with encoder-decoders and decoders."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.console import progress_bar
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range
from hf_ctxmodels.core.generation import (
    LanguagePair,
    check_can_generate,
    control_code_id,
    decode_generated,
    encode_prompts,
    max_input_length,
    max_pair_length,
    max_source_length,
    padding_id,
    target_language_id,
)
from hf_ctxmodels.core.host_copies import CollatedBatch
from hf_ctxmodels.core.model import evaluation_mode
from hf_ctxmodels.data.padding import RowPadder, batches_by_length
from hf_ctxmodels.layers.cpu.linear import prepacked_weights


def generate_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    locations: Sequence[object] = (),
    max_new_tokens: int = 60,
    max_length: int | None = None,
    batch_size: int = 64,
    language: str | None = None,
    source_language: str | None = None,
    control: str | None = None,
    progress: bool = False,
    **options: Any,
) -> list[str]:
    """Generate a text for every source or prompt.

    Without `do_sample` the result for a text does not depend on the other texts.

    Args:
        model, tokenizer: An encoder-decoder (`AutoModelForSeq2SeqLM`), or a decoder (`AutoModelForCausalLM`), whose
            continuation is returned without the prompt, and its tokenizer.
        locations: `file:line` of each text, for errors.
        max_new_tokens: Tokens of the longest generated text.
        max_length: Truncate sources at the end and prompts at the beginning to this number of tokens; None raises an
            error for texts over the model's limit.
        batch_size: Texts per batch; texts of similar length are batched.
        language: Target language: one of `tokenizer.languages` (None for the first one), or, for models with language
            embeddings, one of `config.lang2id`.
        source_language: Language of the texts for models with language embeddings; None for `config.default_lang`.
        control: Control code of a model that was trained with codes, the token before each prompt; prompts may then be
            empty.
        options: Arguments of `generate`, such as `num_beams` and `length_penalty`; greedy search by default.

    Raises:
        CtxError: The model cannot generate, does not support the language or requires one, or has no such code; a text
            is not a string, has no token or too many for the model; a number is too small, or `num_return_sequences` is
            not 1.
    """
    check_can_generate(model)
    if isinstance(texts, str):
        raise CtxError("texts is a str, expected a list of strings.", hint="pass a list with the text.")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise CtxError(
                f"texts[{index}] is a {type(text).__name__}, expected a string.",
                hint="convert it to str, or remove it.",
            )
    numbers = {"max_new_tokens": max_new_tokens, "max_length": max_length, "batch_size": batch_size}
    check_range({**numbers, "num_beams": options.get("num_beams")}, at_least=1)
    if (count := options.get("num_return_sequences") or 1) != 1:
        raise CtxError(
            f"num_return_sequences={count}, but one text is generated per input.",
            hint="repeat the inputs, or call model.generate, which returns ids.",
        )
    languages = LanguagePair.resolve(model.config, source_language, language, ("--source_language", "--language"))
    tokenizer_arguments: dict[str, Any] = (
        {} if languages is None else languages.tokenizer_arguments(tokenizer, languages.source)
    )
    language_ids: dict[str, int] = {}  # argument of `generate` -> id
    if languages is not None:
        names = ("langs", "decoder_langs") if model.config.is_encoder_decoder else ("langs",)
        language_ids = dict(zip(names, languages.ids, strict=False))
    elif source_language is not None:
        location = f"--source_language {source_language}"
        raise CtxError("The model has no language embeddings.", location=location, hint="remove it.")
    elif (language_id := target_language_id(tokenizer, language, model.config)) is not None:
        language_ids = {"target_languages": language_id}
    code = control_code_id(model.config, control)
    if code is not None:
        tokenizer_arguments |= {"add_special_tokens": False}
    if not len(texts):
        return []
    sequences = _encode(model, tokenizer, texts, max_length, tokenizer_arguments)
    if code is not None:
        sequences = [[code, *ids] for ids in sequences]
    _check_lengths(model, tokenizer, texts, sequences, max_new_tokens, locations, may_be_empty=code is not None)
    settings = {"do_sample": False, "max_new_tokens": max_new_tokens, **options}
    if not model.config.is_encoder_decoder and model.generation_config.pad_token_id is None:
        settings.setdefault("pad_token_id", padding_id(tokenizer))
    batches = batches_by_length([*map(len, sequences)], batch_size)
    generated: dict[int, str] = {}
    with evaluation_mode(model), prepacked_weights(getattr(model, "prepacked_bytes", 0)):
        for indices in progress_bar(batches, "generating", unit="batches", enabled=progress):
            batch = make_generation_batch(model, tokenizer, [sequences[index] for index in indices], language_ids)
            output_ids = model.generate(**batch, **settings)
            if not model.config.is_encoder_decoder:
                output_ids = output_ids[:, batch["input_ids"].shape[1] :]
            generated |= dict(zip(indices, decode_generated(tokenizer, output_ids.tolist()), strict=True))
    return [generated[index] for index in range(len(texts))]


def _encode(
    model: Any, tokenizer: Any, texts: Sequence[str], max_length: int | None, tokenizer_arguments: dict[str, Any]
) -> list[list[int]]:
    """Token ids of the texts; prompts without the special tokens at their end."""
    if model.config.is_encoder_decoder:
        truncation = {} if max_length is None else {"truncation": True, "max_length": max_length}
        return tokenizer(list(texts), verbose=False, **truncation, **tokenizer_arguments)["input_ids"]
    sequences = encode_prompts(tokenizer, texts, **tokenizer_arguments)
    return sequences if max_length is None else [ids[-max_length:] for ids in sequences]


def _check_lengths(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    sequences: list[list[int]],
    max_new_tokens: int,
    locations: Sequence[object] = (),
    may_be_empty: bool = False,
) -> None:
    """Raise CtxError for a text without a token, unless it `may_be_empty`, or one that is too long for the model with
    its generated tokens."""
    pair_length = max_pair_length(model.config)
    limit = max_input_length(model.config) if pair_length is None else pair_length
    max_tokens = max_source_length(model.config, max_new_tokens)
    num_special_tokens = len(tokenizer("")["input_ids"]) if model.config.is_encoder_decoder else 0
    if limit is not None:
        shares_positions = max_tokens != limit  # the generated tokens follow the text
        max_new_limit = limit - num_special_tokens - 1 if shares_positions else limit
        if max_new_tokens > max_new_limit:
            longest = max(map(len, sequences))
            fitting = limit - longest if shares_positions and longest < limit else max_new_limit
            text = " and a text" if shares_positions else ""
            raise CtxError(
                f"{max_new_tokens} new tokens{text} exceed the model's {limit} positions.",
                location=f"--max_new_tokens {max_new_tokens}",
                hint=f"use a max_new_tokens of at most {fitting}.",
            )
    for index, (text, ids) in enumerate(zip(texts, sequences, strict=True)):
        if len(ids) <= num_special_tokens or not (may_be_empty or text.strip()):
            location = locations[index] if locations else None
            raise CtxError(f"Text {index} has no words: {text!r}.", location=location, hint="remove the text.")
        if max_tokens is not None and len(ids) > max_tokens:
            generated = "" if max_tokens == limit else f", {max_new_tokens} of them for generated tokens"
            shorter = "" if max_tokens == limit else f" of at most {max_tokens}, or a smaller --max_new_tokens"
            raise CtxError(
                f"Text {index} has {len(ids)} tokens; the model has {limit} positions{generated}.",
                location=locations[index] if locations else f"{text[:60]!r}",
                hint=f"shorten the text, or truncate all texts with a --max_length{shorter}.",
            )


def make_generation_batch(
    model: Any, tokenizer: Any, sequences: list[list[int]], language_ids: dict[str, int]
) -> dict[str, torch.Tensor]:
    """Padded inputs of `generate`; prompts are padded on the left, so that the continuation follows them."""
    side = tokenizer.padding_side if model.config.is_encoder_decoder else "left"
    padder = RowPadder([len(ids) for ids in sequences], side)
    input_ids = padder.pad([np.asarray(ids) for ids in sequences], padding_id(tokenizer))
    batch = {"input_ids": input_ids, "attention_mask": padder.attention_mask()}
    batch_size = len(sequences)
    shapes = {"langs": tuple(input_ids.shape), "decoder_langs": (batch_size, 1), "target_languages": (batch_size,)}
    batch |= {name: torch.full(shapes[name], language_id) for name, language_id in language_ids.items()}
    return CollatedBatch(batch).to(model.device)
