"""Control of the generated text in decoding, for models of this package and of transformers: bags of words, guidance by
a classifier, and answers from a list."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    SequenceBiasLogitsProcessor,
)

from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.flags import check_range
from hf_ctxmodels.core.generation import max_input_length
from hf_ctxmodels.core.model import evaluation_mode
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import load_model_and_tokenizer


def bag_of_words(tokenizer: PreTrainedTokenizerBase, words: Iterable[str], bias: float) -> SequenceBiasLogitsProcessor:
    """A processor that raises the logits of words, with and without a space before them, by `bias` in total.

    A word of k tokens gets `bias` / k at each of them, given its tokens before; a token that continues several words in
    the same way gets the largest of their biases. This is weighted decoding, a baseline of Dathathri et al. 2020 (arXiv
    1912.02164), with a constant weight; the released code of PPLM leaves out words of several tokens. A warning names
    words with unknown tokens, which are left out.

    Raises:
        CtxError: No word has known tokens only.
    """
    words = list(dict.fromkeys(word.strip() for word in words if word.strip()))
    texts = [text for word in words for text in (word, f" {word}")]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    ids_by_text = {
        text: tuple(ids) for text, ids in zip(texts, encoded, strict=True) if ids and tokenizer.unk_token_id not in ids
    }
    if not ids_by_text:
        raise CtxError(
            f"None of the {len(words)} words is in the vocabulary.", hint="use words in the spelling of the text."
        )
    if unknown := [word for word in words if not ids_by_text.keys() & {word, f" {word}"}]:
        print_status(f"warning: words that are not in the vocabulary are left out: {', '.join(unknown)}")
    biases: dict[tuple[int, ...], float] = {}
    for ids in ids_by_text.values():
        for length in range(1, len(ids) + 1):
            biases[ids[:length]] = max(biases.get(ids[:length], 0.0), bias / len(ids), key=abs)
    return SequenceBiasLogitsProcessor([[list(ids), value] for ids, value in biases.items()])


class ClassifierGuidance(LogitsProcessor):
    """Reweights the most probable next tokens by a classifier of the text that they complete (FUDGE).

    The classifier reads each text with each of `num_candidates` next tokens. With the language model's P(x), the scores
    of the candidates are log P(x | label) = log P(x) + `weight` * log P(label | text, x), normalized over them; other
    tokens have the score -inf. A `weight` of 0 returns the scores unchanged.

    References: Yang & Klein 2021 (arXiv 2104.05218). There the classifier is trained on prefixes of texts, 200
    candidates are used, and the weight is 1.

    Args:
        tokenizer: Tokenizer of the language model.
        classifier, classifier_tokenizer: A sequence classifier of any family or of transformers, and its tokenizer. It
            reads the last tokens of a text that is longer than its input.
        label: Name of the label of the generated text.
        weight: Exponent of the classifier's probability.
        num_candidates: Next tokens that the classifier reads, 0 for all.
        batch_size: Texts per batch of the classifier.

    Raises:
        CtxError: The classifier has no labels, or not this one, or a number is out of range.

    Example:
        >>> guidance = ClassifierGuidance.open("runs/reviews-classifier", tokenizer, label="pos", weight=2.0)
        >>> generate_texts(model, tokenizer, ["The film"], logits_processor=[guidance], do_sample=True)
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        classifier: PreTrainedModel,
        classifier_tokenizer: PreTrainedTokenizerBase,
        label: str,
        weight: float = 1.0,
        *,
        num_candidates: int = 50,
        batch_size: int = 256,
    ) -> None:
        check_range({"num_candidates": num_candidates}, at_least=0)
        check_range({"batch_size": batch_size}, at_least=1)
        self.tokenizer, self.classifier, self.classifier_tokenizer = tokenizer, classifier, classifier_tokenizer
        self.label_id = _label_id(classifier.config, label)
        self.weight, self.num_candidates, self.batch_size = weight, num_candidates, batch_size

    @classmethod
    def open(
        cls, source: str, tokenizer: PreTrainedTokenizerBase, label: str, weight: float = 1.0, **options: Any
    ) -> Self:
        """The guidance by the classifier in a directory or of a Hub id; other arguments as of the class."""
        classifier, classifier_tokenizer = load_model_and_tokenizer(source, _classifier_class)
        return cls(tokenizer, classifier, classifier_tokenizer, label, weight, **options)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(batch, length) tokens and (batch, vocabulary) scores of the next token -> the reweighted scores."""
        if self.weight == 0:
            return scores
        vocabulary = min(len(self.tokenizer), scores.shape[1])  # the output layer may be padded
        count = min(self.num_candidates or vocabulary, vocabulary)
        # both (batch, candidates)
        log_probabilities, candidates = scores.float().log_softmax(-1)[:, :vocabulary].topk(count)
        prefixes = input_ids.repeat_interleave(count, 0)
        sequences = torch.cat([prefixes, candidates.reshape(-1, 1)], 1)
        texts = self.tokenizer.batch_decode(sequences, skip_special_tokens=True)
        labels = self.label_log_probabilities(texts).view_as(candidates).to(scores.device)
        # a candidate that another processor has excluded stays so
        guided = (log_probabilities + self.weight * labels).log_softmax(-1).to(scores.dtype)
        return torch.full_like(scores, -torch.inf).scatter(1, candidates, guided)

    def label_log_probabilities(self, texts: Sequence[str]) -> Tensor:
        """(texts,) log-probability of the label, float32; equal texts are classified once. All labels of a blank text
        are equally probable."""
        uniform = -torch.tensor(self.classifier.config.num_labels).float().log()
        values: dict[str, Tensor] = {text: uniform for text in texts if not text.strip()}
        unique_texts = sorted(dict.fromkeys(text for text in texts if text.strip()), key=len)
        tokenizer, limit = self.classifier_tokenizer, max_input_length(self.classifier.config)
        side, tokenizer.truncation_side = tokenizer.truncation_side, "left"  # the candidate is the last token
        try:
            with evaluation_mode(self.classifier):
                for first in range(0, len(unique_texts), self.batch_size):
                    batch = unique_texts[first : first + self.batch_size]
                    options = {} if limit is None else {"truncation": True, "max_length": limit}
                    inputs = tokenizer(batch, padding=len(batch) > 1, return_tensors="pt", **options)
                    logits = self.classifier(**inputs.to(self.classifier.device)).logits
                    values |= dict(zip(batch, logits.float().log_softmax(-1)[:, self.label_id].cpu(), strict=True))
        finally:
            tokenizer.truncation_side = side
        return torch.stack([values[text] for text in texts])


def _classifier_class(config: PreTrainedConfig) -> str:
    """Name of the Auto class of a classifier; raises CtxError for a checkpoint without labels."""
    if not any(name.endswith("ForSequenceClassification") for name in config.architectures or []):
        raise CtxError(
            f"The model is a {(config.architectures or ['model without a head'])[0]}, which has no labels.",
            location=config.name_or_path,
            hint="use a classifier of texts: `hf-ctxmodels finetune sequence-classification`.",
        )
    return "AutoModelForSequenceClassification"


def _label_id(config: PreTrainedConfig, label: str) -> int:
    """Number of a label; raises CtxError if the classifier has no labels, or not this one."""
    if config.problem_type == "regression" or config.num_labels < 2:
        raise CtxError(
            "The classifier has no labels: it predicts a number.",
            location=config.name_or_path or None,
            hint="use a classifier with two labels or more.",
        )
    labels = {str(name): int(number) for number, name in config.id2label.items()}
    if label not in labels:
        raise CtxError(
            f"The classifier has no label {label!r}.",
            location=config.name_or_path or None,
            hint=f"use one of {', '.join(labels)}.",
        )
    return labels[label]


def allowed_answers(
    tokenizer: PreTrainedTokenizerBase, answers: Sequence[str], prompt_length: int
) -> Callable[[int, Tensor], list[int]]:
    """A `prefix_allowed_tokens_fn` of `generate` that allows exactly the answers, each followed by the `eos_token`.

    Args:
        answers: Texts as they follow the prompt, usually with a space before the first word.
        prompt_length: Number of tokens before the answer, padding included: `input_ids.shape[1]` of a decoder, 1 for
            an encoder-decoder with one start token.

    Raises:
        CtxError: An answer has no token, or the tokenizer no `eos_token`.
    """
    end = tokenizer.eos_token_id
    encoded = tokenizer(list(answers), add_special_tokens=False)["input_ids"] if answers else []
    empty = [answer for answer, ids in zip(answers, encoded, strict=True) if not ids]
    if end is None or empty or not answers:
        raise CtxError(
            "The tokenizer has no eos_token." if end is None else f"Answers without a token: {empty}.",
            hint="use answers with one token or more, and a tokenizer with an eos_token.",
        )
    allowed: dict[tuple[int, ...], set[int]] = {}
    for ids in encoded:
        for position, token_id in enumerate([*ids, end]):
            allowed.setdefault(tuple(ids[:position]), set()).add(token_id)
    return lambda batch_id, input_ids: sorted(allowed.get(tuple(input_ids[prompt_length:].tolist()), {end}))
