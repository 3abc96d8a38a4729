"""A model in the explorer: predictions, probabilities of words, attention, neighbors and senses."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ctxmodels.analysis.attention.maps import attention_maps
from hf_ctxmodels.analysis.figures import AttentionView, ScatterMap
from hf_ctxmodels.analysis.senses import (
    Occurrence,
    context_text,
    find_occurrences,
    nearest_to_vectors,
    project,
    sample_occurrences,
)
from hf_ctxmodels.analysis.word_comparison import WordScores, score_words
from hf_ctxmodels.architectures.word_encoder import EncodedCorpus, WordEncoder
from hf_ctxmodels.core.devices import DeviceArguments
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.host_copies import CollatedBatch
from hf_ctxmodels.core.model import evaluation_mode
from hf_ctxmodels.downstream.adapters.adapter_checkpoints import load_model_and_tokenizer
from hf_ctxmodels.evaluation.perplexity import is_permutation_lm
from hf_ctxmodels.evaluation.scoring import input_length, likelihood_kind, predict_tokens, saved_language_model_class

BLANK = "___"
"""Stands for a missing word in a sentence."""
MAX_TOKENS = 64
MAX_OCCURRENCES = 300


class Prediction(NamedTuple):
    """A token and its probability."""

    token: str
    probability: float


class ExploredModel:
    """A model, its tokenizer, and optionally a corpus that it has encoded.

    Args:
        name: Short name, unique among the models of a page.
        model, tokenizer: A base model, or a masked or causal language model.

    Attributes:
        task: Kind of a language model that predicts missing words, or the next one (causal); None for other models.
        is_language_model: Whether the model scores the words of a sentence.
        corpus: The encoded corpus, after `encode_corpus`.
    """

    def __init__(self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.name, self.model, self.tokenizer = name, model.eval(), tokenizer
        self.encoder = WordEncoder(model, tokenizer)
        self.corpus: EncodedCorpus | None = None
        self.task: Literal["masked", "permutation", "bidirectional", "causal"] | None = None
        self.is_language_model = False
        with suppress(CtxError):
            score_kind = likelihood_kind(model, tokenizer)
            self.is_language_model = True
            if score_kind == "pseudo-log-likelihood":
                self.task = "permutation" if is_permutation_lm(model) else "masked"
            elif getattr(model, "label_axes", ()):
                self.task = "bidirectional"
            elif model.can_generate() and not getattr(model, "is_backward", False):
                self.task = "causal"

    @classmethod
    def open(cls, name: str, source: str, placement: DeviceArguments) -> "ExploredModel":
        """Open a directory or Hub id with the head that it was saved with; raises CtxError if it cannot be opened."""
        model, tokenizer = load_model_and_tokenizer(
            source, lambda config: saved_language_model_class(config) or "AutoModel"
        )
        return cls(name, placement.place(model), tokenizer)

    def encode_corpus(self, sentences: Sequence[Sequence[str]], cache_dir: str | None = None) -> None:
        """Encode the sentences in all layers, in float16; raises CtxError if a vector is not finite."""
        corpus = self.encoder.encode_corpus(sentences, cache_dir=cache_dir, dtype=torch.float16)
        self._check_finite(corpus.vectors, "vectors (in float16)")
        self.corpus = corpus

    def _check_finite(self, values: Tensor, description: str) -> None:
        if not values.isfinite().all():
            message = f"The {description} of the model are not finite."
            raise CtxError(message, location=self.name, hint="use another checkpoint.")

    @property
    def description(self) -> dict[str, Any]:
        """Model metadata for the page."""
        words = 0 if self.corpus is None else len(self.corpus.vectors)
        return {
            "name": self.name,
            "class": type(self.model).__name__,
            "task": self.task,
            "is_language_model": self.is_language_model,
            "layers": list(self.encoder.layers),
            "corpus_words": words,
        }

    # Predictions

    def predict(self, sentence: str, count: int = 10) -> list[list[Prediction]]:
        """The most probable tokens: for each blank of the sentence, or (causal) after the part of the sentence before
        the first blank.

        Raises:
            CtxError: The model has no language modeling head, the sentence is too long, or has no blank.
        """
        if self.task == "causal":
            ids = self._ids_to_continue(sentence.partition(BLANK)[0].strip())
            return [self._best(self._logits(ids)[-1], count)]
        if self.task is None:
            raise CtxError(
                f"{type(self.model).__name__} has no head that predicts a missing or the next word.",
                location=self.name,
                hint="use a checkpoint of a masked or causal language model.",
            )
        text = self._fill_blanks(sentence)
        encoding = self.tokenizer(text, return_offsets_mapping=True, verbose=False)
        self._check_length(len(encoding["input_ids"]))
        if self.tokenizer.mask_token_id is not None:
            is_blank = [token == self.tokenizer.mask_token_id for token in encoding["input_ids"]]
        else:  # blanks are words of characters
            is_blank = [text[start:end] == BLANK for start, end in encoding["offset_mapping"]]
        positions = [index for index, blank in enumerate(is_blank) if blank]
        if not positions:
            raise CtxError("The sentence has no blank.", hint=f"write {BLANK} for the missing word.")
        predictions = predict_tokens(self.model, self.tokenizer, text, positions)
        return [self._best(log_probabilities, count) for log_probabilities in predictions]

    def score_words(self, sentence: str) -> WordScores:
        """The scores of the words of a sentence, without its blanks, see `hf_ctxmodels.analysis.word_comparison`.

        Raises:
            CtxError: The model is not a language model, or the sentence is too long.
        """
        text = " ".join(sentence.replace(BLANK, " ").split())
        self._check_length(input_length(self.model, self.tokenizer, text))
        scores = score_words(self.model, self.tokenizer, text)
        assert scores is not None, "the length was checked"
        word_scores = [value for value in scores.log_probabilities if value is not None]
        self._check_finite(torch.tensor(word_scores), "scores of words")
        return scores

    def _fill_blanks(self, text: str) -> str:
        """A text with mask tokens for blanks, if the tokenizer has one."""
        return text if self.tokenizer.mask_token is None else text.replace(BLANK, str(self.tokenizer.mask_token))

    def _ids_to_continue(self, text: str) -> list[int]:
        """Ids of the beginning of a text; the end-of-text token, the separator of texts in training, precedes them if
        the tokenizer puts no special token there."""
        ids, special_ids = list(self.tokenizer(text, verbose=False)["input_ids"]), self.tokenizer.all_special_ids
        while len(ids) > 1 and ids[-1] in special_ids:
            ids.pop()
        if self.tokenizer.eos_token_id is not None and (not ids or ids[0] not in special_ids):
            ids.insert(0, self.tokenizer.eos_token_id)
        if not ids:
            raise CtxError("There is no word to continue.", hint="write the beginning of a sentence.")
        self._check_length(len(ids))
        return ids

    def _check_length(self, tokens: int) -> None:
        limit = min(MAX_TOKENS, self.encoder.max_length or MAX_TOKENS)
        if tokens > limit:
            raise CtxError(
                f"The sentence has {tokens} tokens, the limit is {limit}.",
                location=self.name,
                hint="write a shorter sentence.",
            )

    def _logits(self, sequence: Sequence[int]) -> Tensor:
        """(length, vocabulary) logits on the CPU."""
        ids = torch.tensor([sequence])
        inputs = CollatedBatch({"input_ids": ids, "attention_mask": torch.ones_like(ids)}).to(self.model.device)
        with evaluation_mode(self.model):
            return self.model(**inputs).logits[0].float().cpu()

    def _best(self, logits: Tensor, count: int) -> list[Prediction]:
        probabilities = logits.softmax(-1)
        self._check_finite(probabilities, "predictions")
        values, indices = probabilities.topk(min(count, len(logits)))
        tokens = [self.tokenizer.decode([index]) for index in indices.tolist()]
        return [Prediction(token, value) for token, value in zip(tokens, values.tolist(), strict=True)]

    # Attention

    def attention_view(self, sentence: str) -> AttentionView:
        """Attention of the tokens of a sentence; raises CtxError if the sentence is too long, or the model has no
        attention."""
        features = dict(self.tokenizer(self._fill_blanks(sentence), verbose=False))
        self._check_length(len(features["input_ids"]))
        [attention] = attention_maps(self.model, self.tokenizer, [features])
        tokens = self.tokenizer.convert_ids_to_tokens(features["input_ids"])
        return AttentionView("attention", f"Attention of {self.name}", tokens, attention.tolist())

    # Words in context

    def _require_corpus(self) -> EncodedCorpus:
        if self.corpus is None:
            raise CtxError("There is no corpus.", hint="start the page with --corpus FILE.")
        return self.corpus

    def _layer_index(self, layer: int) -> int:
        if layer not in self.encoder.layers:
            raise CtxError(f"{self.name} has no layer {layer}.", hint=f"use one of {self.encoder.layers}.")
        return self.encoder.layers.index(layer)

    def _encode_word(self, words: Sequence[str], position: int, layer: int) -> Tensor:
        """(hidden,) vector of a word of a sentence."""
        index = self._layer_index(layer)
        if not 0 <= position < len(words):
            raise CtxError(f"The sentence has no word {position}.", hint="select a word of the sentence.")
        [sentence] = self.encoder.encode([[self._fill_blanks(word) for word in words]])
        if not sentence.has_tokens[position]:
            raise CtxError(f"The tokenizer has no token for {words[position]!r}.", hint="select another word.")
        self._check_finite(sentence.vectors[position, index], "vectors")
        return sentence.vectors[position, index]

    def neighbors(
        self, words: Sequence[str], position: int, layer: int, count: int = 10
    ) -> list[tuple[str, str, float]]:
        """The occurrences in the corpus that are nearest to a word of a sentence, by cosine: word, context, cosine.

        Raises:
            CtxError: There is no corpus, no such word or layer.
        """
        corpus = self._require_corpus()
        query = self._encode_word(words, position, layer)
        [neighbors] = nearest_to_vectors(corpus, query[None], self._layer_index(layer), count)
        rows = []
        for occurrence, cosine in neighbors:
            sentence = corpus.sentences[occurrence.sentence]
            rows.append((sentence[occurrence.start], context_text(sentence, occurrence), cosine))
        return rows

    def sense_map(self, words: Sequence[str], position: int, layer: int) -> ScatterMap:
        """Map of the occurrences in the corpus of a word of a sentence, and of the word itself, by their first two
        principal components.

        Raises:
            CtxError: There is no corpus, no such word or layer, or the word occurs less than twice in the corpus.
        """
        corpus, word = self._require_corpus(), words[position] if 0 <= position < len(words) else ""
        query = self._encode_word(words, position, layer)
        all_occurrences = find_occurrences(corpus.sentences, word)
        occurrences = sample_occurrences(all_occurrences, MAX_OCCURRENCES)
        number = f"{len(occurrences):,}"
        if len(occurrences) < len(all_occurrences):
            number = f"A random sample of {number} of {len(all_occurrences):,}"
        rows = torch.tensor([int(corpus.starts[item.sentence]) + item.start for item in occurrences])
        vectors = torch.cat([corpus.vectors[rows, self._layer_index(layer)].float(), query[None]])
        points = project(vectors[:, None])[:, 0].tolist()
        texts = [context_text(corpus.sentences[item.sentence], item) for item in occurrences]
        texts.append(context_text(words, Occurrence(0, position, position + 1)))
        groups = ["corpus"] * len(occurrences) + ["your sentence"]
        return ScatterMap(
            f"senses-{layer}", f"{word} in {self.name}, layer {layer}", points, groups, texts,
            caption=f"{number} occurrences in the corpus; projected to two principal components.",
        )  # fmt: skip
