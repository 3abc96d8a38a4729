"""Unsupervised translation (Lample & Conneau 2019, section 4.2; Lample et al. 2018): denoising and on-the-fly
back-translation of text in several languages."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.utils import ModelOutput

from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range, flag
from hf_ctxmodels.core.generation import max_input_length
from hf_ctxmodels.core.model import evaluation_mode
from hf_ctxmodels.data.padding import Batch, PaddingCollator, language_columns, pad_targets, required_token
from hf_ctxmodels.data.seeding import Purpose
from hf_ctxmodels.objectives.base import batch_statistics, target_rates
from hf_ctxmodels.objectives.features import check_token_ids, feature_generator
from hf_ctxmodels.objectives.masked_segment import MaskingWithLanguages

_END_OF_WORD = "</w>"  # suffix of the last subword of a word
# longest translation in tokens, relative to its sentence; in the release, to the longest sentence of a batch
_LENGTH_FACTOR, _LENGTH_OFFSET = 1.3, 5


def parse_weight_schedule(text: str, name: str) -> list[tuple[int, float]]:
    """The (step, weight) points of "0:1,100000:0.1,300000:0", or of a constant; raises CtxError for another form, or a
    weight that is negative or not finite."""
    try:
        points = [(0, float(text))] if ":" not in text else []
        if not points:
            pairs = [point.split(":") for point in text.split(",")]
            points = [(int(step), float(weight)) for step, weight in pairs]
    except ValueError:
        points = []
    steps = [step for step, _ in points]
    if not points or steps[0] != 0 or steps != sorted(set(steps)):
        raise CtxError(
            f"{name}={text} is not a schedule of weights.",
            hint="use a number, or ascending STEP:WEIGHT points from step 0, such as 0:1,100000:0.1,300000:0.",
        )
    if invalid := [weight for _, weight in points if weight < 0 or not math.isfinite(weight)]:
        raise CtxError(f"{name}={text} has the weight {invalid[0]:g}.", hint="use finite weights of at least 0.")
    return points


def scheduled_weight(points: list[tuple[int, float]], step: int) -> float:
    """The weight at a step, interpolated linearly, and constant after the last point."""
    steps, weights = zip(*points, strict=True)
    return float(np.interp(step, steps, weights))


@dataclass
class DataCollatorForBackTranslation(PaddingCollator):
    """Pads sentences as sources to translate, and adds noise to them for denoising (Lample et al. 2018, section 2.3).

    The noise first shuffles words, each by fewer than `word_shuffle` positions, then drops each word with probability
    `word_dropout`, then replaces each remaining word by one mask token per subword with probability `word_blank`. The
    first and the last token are unchanged, and one word always remains. A word ends with a token with the suffix
    "</w>". XLM's released code applies the noise to single tokens.

    Each feature holds:
        input_ids: (tokens,) with special tokens, one of them at its beginning.
        language: The language id.

    Returns: input_ids, attention_mask (batch, width), the sentences with noise; labels (batch, steps), the sentences
    without their first token, -100 after them; langs (batch, width), decoder_langs (batch, steps), their language;
    sentence_ids, sentence_mask (batch, sentence width), the sentences; other_langs (batch,), the language to translate
    each sentence to, sampled from the others.
    """

    word_shuffle: float = flag(3.0, "Words are moved by fewer than this many positions; 0 for no shuffling.")
    word_dropout: float = flag(0.1, "Probability of dropping a word.")
    word_blank: float = flag(0.1, "Probability of masking a remaining word.")
    static: bool = flag(False, "The same noise in every epoch instead of new noise.")
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "word_shuffle", at_least=0)
        check_range(self, "word_dropout", "word_blank", at_least=0, at_most=1)
        self.mask_id = required_token(self.tokenizer, "mask_token", "replaces words")
        vocabulary = self.tokenizer.get_vocab()
        self.num_languages = len(getattr(self.tokenizer, "languages", ()))
        self.ends_word = np.zeros(max(vocabulary.values()) + 1, dtype=bool)
        self.ends_word[[number for token, number in vocabulary.items() if token.endswith(_END_OF_WORD)]] = True

    def add_noise(self, ids: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """(tokens,) ids of a sentence -> ids with noise."""
        check_token_ids(ids, len(self.ends_word))
        inner = ids[1:-1]
        words = np.split(inner, np.flatnonzero(self.ends_word[inner][:-1]) + 1) if len(inner) else []
        if self.word_shuffle and words:
            order = np.argsort(np.arange(len(words)) + rng.uniform(0, self.word_shuffle, len(words)), kind="stable")
            words = [words[index] for index in order]
        if self.word_dropout and words:
            keeps = rng.random(len(words)) >= self.word_dropout
            if not keeps.any():
                keeps[rng.integers(len(words))] = True
            words = [word for word, keep in zip(words, keeps, strict=True) if keep]
        if self.word_blank and words:
            blanks = rng.random(len(words)) < self.word_blank
            words = [
                np.full_like(word, self.mask_id) if blank else word for word, blank in zip(words, blanks, strict=True)
            ]
        return np.concatenate([ids[:1], *words, ids[-1:]])

    def other_language(self, feature: Mapping[str, Any]) -> int:
        """A language id other than the feature's."""
        language = int(feature["language"])
        rng = feature_generator(feature, self.seed, Purpose.PAIRING, period=1 if self.static else None)
        index = int(rng.integers(self.num_languages - 1))
        return index + (index >= language)

    def collate(self, features: list[dict[str, Any]]) -> Batch:
        """Add noise and pad features; see the class for their columns and the returned ones."""
        sentences = [np.asarray(feature["input_ids"]).astype(np.int64) for feature in features]
        noised = [
            self.add_noise(sentence, feature_generator(feature, self.seed, period=1 if self.static else None))
            for sentence, feature in zip(sentences, features, strict=True)
        ]
        _, sources = self.pad_inputs(sentences)
        _, batch = self.pad_inputs(noised)
        batch["labels"] = pad_targets([sentence[1:] for sentence in sentences])
        batch |= language_columns(features, batch)
        return batch | {
            "sentence_ids": sources["input_ids"],
            "sentence_mask": sources["attention_mask"],
            "other_langs": torch.tensor([self.other_language(feature) for feature in features]),
        }


@dataclass
class BackTranslationOutput(ModelOutput):
    """Loss of `BackTranslationLoss`, and its terms in nats per target before they are weighted, detached."""

    loss: Tensor | None = None
    denoising_loss: Tensor | None = None
    back_translation_loss: Tensor | None = None


class BackTranslationLoss(TrainerCallback):
    """Loss of `BackTranslation`: lambda_ae times the loss of denoising, plus lambda_bt times the loss of generating
    each sentence from its translation by the current model.

    The translation is generated greedily in evaluation mode and without gradients. It is a `LossFunction` of the
    training loop, and a callback, for the step of the schedules.
    """

    targets = ("labels",)

    def __init__(self, lambda_ae: list[tuple[int, float]], lambda_bt: list[tuple[int, float]]) -> None:
        self.lambda_ae, self.lambda_bt = lambda_ae, lambda_bt
        self.step = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Store the number of completed steps."""
        self.step = state.global_step

    def __call__(
        self, model: nn.Module, batch: Mapping[str, Any], num_items_in_batch: Any = None
    ) -> BackTranslationOutput:
        """The loss of a batch of the collator; `model` may be wrapped for several processes."""
        targets = {name: batch[name] for name in ("labels", "decoder_langs")}
        denoising_weight, translation_weight = (
            scheduled_weight(points, self.step) for points in (self.lambda_ae, self.lambda_bt)
        )
        output = BackTranslationOutput()
        terms = []
        if denoising_weight:
            sources = {name: batch[name] for name in ("input_ids", "attention_mask", "langs")}
            loss = model(**sources, **targets, num_items_in_batch=num_items_in_batch).loss
            output["denoising_loss"] = loss.detach()
            terms.append(denoising_weight * loss)
        if translation_weight:
            sentences = {name: batch[name] for name in ("sentence_ids", "sentence_mask", "other_langs", "langs")}
            sources = translate(getattr(model, "module", model), **sentences)
            loss = model(**sources, **targets, num_items_in_batch=num_items_in_batch).loss
            output["back_translation_loss"] = loss.detach()
            terms.append(translation_weight * loss)
        if not terms:
            raise CtxError(f"All weights are 0 at step {self.step}.", hint="change lambda_ae or lambda_bt.")
        output["loss"] = torch.stack(terms).sum()
        return output


def translate(
    model: Any, sentence_ids: Tensor, sentence_mask: Tensor, other_langs: Tensor, langs: Tensor
) -> dict[str, Tensor]:
    """Translate sentences greedily, in evaluation mode and without gradients.

    Args:
        model: An encoder-decoder with language embeddings.
        sentence_ids, sentence_mask: (batch, width).
        other_langs: (batch,) language to translate each sentence to.
        langs: (batch, ...) language ids, of which the first is the language of a sentence.

    Returns: input_ids, attention_mask and langs (batch, length) of the translations, which begin with the decoder's
    start token and end with the end token. A translation has at most 1.3 times the tokens of its sentence, plus 5; a
    longer one is cut there, so that it does not depend on the other sentences of the batch.
    """
    limits = (_LENGTH_FACTOR * sentence_mask.sum(1)).long() + _LENGTH_OFFSET
    if (max_length := max_input_length(model.config)) is not None:
        limits = limits.clamp(max=max_length - 1)
    with evaluation_mode(model):
        generated = model.generate(
            input_ids=sentence_ids,
            attention_mask=sentence_mask,
            langs=langs[:, :1].expand_as(sentence_ids),
            decoder_langs=other_langs[:, None],
            max_new_tokens=int(limits.max()),
            num_beams=1,
            do_sample=False,
        )
    ends = model.config.eos_token_id
    end_id = ends if isinstance(ends, int) else ends[0]
    steps = torch.arange(1, generated.shape[1], device=generated.device)
    is_end = (generated[:, 1:] == end_id) | (steps == limits[:, None])
    has_end_before = is_end.cumsum(1) - is_end.long() > 0
    generated[:, 1:] = generated[:, 1:].masked_fill(is_end, end_id)
    token_mask = torch.cat([torch.ones_like(is_end[:, :1]), ~has_end_before], 1)
    pad_token_id = model.config.pad_token_id
    return {
        "input_ids": generated.masked_fill(~token_mask, 0 if pad_token_id is None else pad_token_id),
        "attention_mask": token_mask.long(),
        "langs": other_langs[:, None].expand_as(generated),
    }


@dataclass
class BackTranslation(DataCollatorForBackTranslation, MaskingWithLanguages):
    """Unsupervised translation: reconstruct sentences from noise, and from translations by the current model.

    An example is a sentence of a text in one of at least two languages, which have tags (`--language_tags`). A longer
    sentence than `max_length` is skipped and counted. Every step has both losses, on all sentences of the batch; in the
    released code they alternate. The model is pretrained: MASS, or an encoder-decoder from two XLM models.

    | document | source | targets |
    |---|---|---|
    | `a b c d` in English | `</s> b a _ d </s>` in English | `a b c d </s>` in English |
    | `a b c d` in English | `</s> A B C </s>` in French, generated from the sentence | `a b c d </s>` in English |

    References: Lample & Conneau 2019 (arXiv 1901.07291), section 4.2; Lample et al. 2018 (arXiv 1711.00043 and
    1804.07755); Song et al. 2019 (arXiv 1905.02450), section 4.2, without denoising (`lambda_ae=0`); the released code.
    Related: `MaskedSegment` pretrains MASS; `MaskedTranslation` learns from translations.

    Example:
        >>> BackTranslation(tokenizer, max_length=100, seed=0, lambda_ae="0:1,100000:0.1,300000:0")
    """

    has_heldout_loss = False  # the sources are generated in training only
    skip_reason = "sentences are too short or too long"
    lambda_ae: str = flag(
        "0:1,100000:0.1,300000:0", "Weight of denoising: a number, or STEP:WEIGHT points, interpolated linearly."
    )
    lambda_bt: str = flag("1", "Weight of back-translation, as lambda_ae.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.reader.is_multilingual:
            raise CtxError(
                "The tokenizer has fewer than two languages.",
                hint="train it on text with language tags: data tokenizer --language_tags.",
            )
        self.immutable_config_fields = ("n_langs", "lang2id")
        schedules = {name: parse_weight_schedule(getattr(self, name), name) for name in ("lambda_ae", "lambda_bt")}
        self.loss_function = BackTranslationLoss(**schedules)

    def count_batch(self, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Counts of `batch_statistics`, and mask tokens of the sources with noise, and tokens of the sentences."""
        counts = batch_statistics(batch, self.tokenizer.unk_token_id, self.mask_id)
        return counts | {"sentence_tokens": int(batch["sentence_mask"].sum())}

    def rates(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Rates of `target_rates`, and the shares of tokens that are dropped and masked."""
        sentence_tokens = max(1, counts["sentence_tokens"])
        return {
            **target_rates(counts),
            "dropped_share": 1 - counts["tokens"] / sentence_tokens,
            "mask_share": counts["masks"] / sentence_tokens,
        }
