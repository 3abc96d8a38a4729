"""Translations of texts, and their BLEU."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.evaluation_mode import evaluation_mode


@dataclass(frozen=True)
class Score:
    """BLEU of a corpus.

    Attributes:
        bleu: 0 to 100.
        signature: sacreBLEU's signature of the metric.
    """

    bleu: float
    signature: str


def translate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    num_beams: int = 1,
    max_new_tokens: int = 60,
    batch_size: int = 64,
    language: str | None = None,
    **options: Any,
) -> list[str]:
    """The translation of every text.

    Args:
        model: A model of `AutoModelForSeq2SeqLM`.
        tokenizer: Its tokenizer, with `decode_target` if the target has a vocabulary of its own.
        texts: Texts in the source language.
        num_beams: Beams; 1 is greedy.
        max_new_tokens: Maximum length of a translation.
        batch_size: Texts per batch; texts of similar length are batched.
        language: The target language, one of `tokenizer.languages`; None for the first or only one.
        options: Arguments of `generate`, such as `length_penalty`.

    Raises:
        CtxError: The model does not translate, or not into this language, or a text has no words.
    """
    decode = getattr(tokenizer, "decode_target", None)
    shared = getattr(model.config, "target_vocab_size", None) == getattr(model.config, "vocab_size", None)
    if not (model.can_generate() and model.config.is_encoder_decoder and (decode or shared)):
        raise CtxError(
            f"{type(model).__name__} with {type(tokenizer).__name__} does not translate.",
            hint="use a translation model, with its tokenizer.",
        )
    decode = partial(tokenizer.batch_decode, skip_special_tokens=True) if decode is None else decode
    languages = getattr(tokenizer, "languages", [])
    if language is not None and language not in languages:
        raise CtxError(
            f"The model does not translate into {language!r}.", hint=f"use one of {', '.join(languages) or 'none'}."
        )
    encoded = tokenizer(list(texts), verbose=False)["input_ids"]
    special = tokenizer.num_special_tokens_to_add()
    for number, ids in enumerate(encoded):
        if len(ids) == special:
            raise CtxError(f"Text {number} (counted from 0) has no words: {texts[number]!r}.", hint="remove it.")
    order = sorted(range(len(texts)), key=lambda number: len(encoded[number]))
    generate = partial(model.generate, num_beams=num_beams, do_sample=False, max_new_tokens=max_new_tokens)
    found: dict[int, str] = {}
    with evaluation_mode(model):
        for first in range(0, len(order), batch_size):
            numbers = order[first : first + batch_size]
            batch = tokenizer.pad({"input_ids": [encoded[number] for number in numbers]}, return_tensors="pt")
            batch = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
            if language is not None:
                batch["target_languages"] = torch.full((len(numbers),), languages.index(language), device=model.device)
            generated = generate(**batch, **options)
            found |= dict(zip(numbers, decode(generated.tolist()), strict=True))
    return [found[number] for number in range(len(texts))]


def score_translations(translations: Sequence[str], references: Sequence[str], *, lower_case: bool = False) -> Score:
    """sacreBLEU (Post 2018) of a corpus with one reference for each text.

    Raises:
        CtxError: The numbers of texts and references differ or are 0, or sacreBLEU is not installed.
    """
    if len(translations) != len(references) or not references:
        raise CtxError(f"{len(translations)} translations, {len(references)} references.", hint="give one for each.")
    try:
        from sacrebleu.metrics import BLEU
    except ImportError as error:
        raise CtxError("sacreBLEU is not installed.", hint="pip install 'hf_ctxmodels[translation]'.") from error
    metric = BLEU(lowercase=lower_case)
    bleu = metric.corpus_score(list(translations), [list(references)]).score
    return Score(float(bleu), str(metric.get_signature()))
