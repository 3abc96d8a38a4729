"""Extractive question answering: a question and a context -> the span that answers it (SQuAD 1.1 and 2.0)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unicodedata import category

import numpy as np
from scipy.special import expit
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hf_ctxmodels.core.errors import CtxError, wrap_errors
from hf_ctxmodels.core.loading import parse_json
from hf_ctxmodels.data.files import file_suffix
from hf_ctxmodels.data.record_files import RECORD_SUFFIXES, has_records, read_records
from hf_ctxmodels.data.table_files import has_columns, read_table
from hf_ctxmodels.data.text_files import read_text
from hf_ctxmodels.downstream.networks.tokenization import CtxTaskNetworkTokenizer
from hf_ctxmodels.downstream.tasks import metrics
from hf_ctxmodels.downstream.tasks.base import Collator, Encoded, Logits, Task, WordCollator, get_texts
from hf_ctxmodels.registry import FAMILIES

MAX_QUESTION_TOKENS = 64  # longer questions are truncated, as in BERT's SQuAD runs (Devlin et al. 2019, released code)
_RECORD_HINT = (
    'write {"id": ..., "question": ..., "context": ..., "answers": {"text": [...], "answer_start": [...]}}, with empty '
    "lists for an unanswerable question."
)
_SQUAD_HINT = (
    'write {"data": [{"paragraphs": [{"context": ..., "qas": [{"id": ..., "question": ..., "answers": '
    '[{"text": ..., "answer_start": ...}]}]}]}]}.'
)


@dataclass(frozen=True)
class Question:
    """A question about a context; `answers` are (offset in characters, text), empty if it is unanswerable."""

    id: str
    question: str
    context: str
    answers: tuple[tuple[int, str], ...]
    location: str


@dataclass(frozen=True)
class AnswerSpan:
    """A predicted answer ("" for none), and the predicted probability that there is no answer."""

    text: str
    no_answer_probability: float = 0.0


@dataclass(frozen=True)
class Window:
    """The part of a context that one feature contains.

    Attributes:
        example: Index of the example.
        null_position: The token that represents "no answer in this window".
        spans: (tokens, 2) begin and end in characters of each token of the context, (-1, -1) for other tokens.
    """

    example: int
    null_position: int
    spans: np.ndarray

    def target(self, question: Question) -> tuple[int, int]:
        """First and last token of the first answer; the null position for both if the window lacks a part of it."""
        null = self.null_position, self.null_position
        if not question.answers:
            return null
        begin, text = question.answers[0]
        end = begin + len(text)
        starts, ends = self.spans[:, 0], self.spans[:, 1]
        in_context = np.flatnonzero(starts >= 0)
        # Spaces at the ends of the answer belong to no token, so the ends of the answer may not be ends of tokens.
        overlapping = np.flatnonzero((starts >= 0) & (starts < end) & (ends > begin))
        first_character, last_character = end - len(text.lstrip()), begin + len(text.rstrip())
        if not len(overlapping) or first_character < starts[in_context[0]] or last_character > ends[in_context[-1]]:
            return null
        return int(overlapping[0]), int(overlapping[-1])


def read_squad(file: str, has_answers: bool = True) -> list[Question]:
    """The questions of a SQuAD 1.1 or 2.0 JSON file, or of records with the columns of SQuAD on the Hub, without
    answers unless `has_answers`; raises CtxError if an id is repeated, or an answer is not at its offset."""
    with wrap_errors("Not SQuAD's format", location=file, hint=_SQUAD_HINT):
        read_questions = _json_questions if file_suffix(file) == ".json" else _record_questions
        questions = [*read_questions(file, has_answers)]
    if not questions:
        raise CtxError("The file has no questions.", location=file, hint="use a file with at least one question.")
    ids: set[str] = set()
    for question in questions:
        if question.id in ids:
            raise CtxError("Two questions have this id.", location=question.location, hint="make the ids unique.")
        ids.add(question.id)
        for start, text in question.answers:
            actual = question.context[max(start, 0) : start + len(text)]
            if actual != text or not text:
                raise CtxError(
                    f"The answer {text!r} is not at character {start} of its context; found {actual!r}.",
                    location=question.location,
                    hint="correct answer_start (in characters, not bytes), or remove the question.",
                )
    return questions


def _json_questions(file: str, has_answers: bool) -> Iterator[Question]:
    content = parse_json(read_text(file), location=file, hint=_SQUAD_HINT)
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            for entry in paragraph["qas"]:
                answers = () if entry.get("is_impossible") or not has_answers else entry["answers"]
                spans = tuple((int(answer["answer_start"]), str(answer["text"])) for answer in answers)
                yield _question(entry, paragraph["context"], spans, f"{file}, question {entry['id']!r}")


def _record_questions(file: str, has_answers: bool) -> Iterator[Question]:
    for record, location in read_records(file):
        with wrap_errors("Not a question of SQuAD", location=location, hint=_RECORD_HINT):
            answers = record["answers"] if has_answers else {"answer_start": (), "text": ()}
            spans = tuple(zip(map(int, answers["answer_start"]), map(str, answers["text"]), strict=True))
            yield _question(record, record["context"], spans, str(location))


def _question(entry: Mapping[str, Any], context: Any, spans: tuple[tuple[int, str], ...], location: str) -> Question:
    """A question; raises TypeError if a text is missing."""
    texts = entry["question"], context
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"a text is {str(texts)[:80]}")
    return Question(str(entry["id"]), *texts, spans, location)


def has_answers(file: str) -> bool:
    """Whether a SQuAD file has answers, or questions that are marked as unanswerable; records, such as those of a test
    split, have labels if a list of answers is not empty."""
    if has_records(file):
        with wrap_errors("Not SQuAD's format", location=file, hint=_RECORD_HINT):
            return any((record.get("answers") or {}).get("text") for record, _ in read_records(file))
    content = parse_json(read_text(file), location=file, hint=_SQUAD_HINT)
    with wrap_errors("Not SQuAD's JSON", location=file, hint=_SQUAD_HINT):
        paragraphs = [paragraph for article in content["data"] for paragraph in article["paragraphs"]]
        entries = [entry for paragraph in paragraphs for entry in paragraph["qas"]]
        return any(entry.get("answers") or entry.get("is_impossible") for entry in entries)


class QuestionAnswering(Task[Question]):
    """Spans of a context; long contexts are split into windows that share `doc_stride` tokens.

    The target of a window that lacks a part of the answer is the null position (the classification token), as in Devlin
    et al. 2019, sections 4.2 and 4.3. The prediction is the best span of all windows; if the data have unanswerable
    questions, it is "" if the null score of each window exceeds the score of this span by more than
    `null_threshold`.

    A head with beam search (Yang et al. 2019, released code for SQuAD 2.0) learns the null position of such a window as
    its answer, too, and whether there is an answer. The score of a span is the log-probability of its start plus
    the log-probability of its end given the start. The null score is the logit of no answer, which is compared with 0.
    """

    name = "question-answering"
    auto_class = "AutoModelForQuestionAnswering"
    targets: tuple[str, ...] = ("start_positions", "end_positions")
    output_names: tuple[str, ...] = ("start_logits", "end_logits")
    has_token_outputs = True
    is_percentage = True
    argument_names = ("max_length", "doc_stride", "max_answer_length", "span_beam_search", "null_threshold")

    has_unanswerable: bool = False
    has_beam_search: bool = False
    """Whether the head predicts spans by beam search; see `use_beam_search`."""

    def read_file(self, file: str) -> list[Question]:
        """Read the examples of a file."""
        if file_suffix(file) != ".json" and not has_records(file):
            raise CtxError(
                f"Expected a .json file in SQuAD's format, or {' or '.join(RECORD_SUFFIXES)} with SQuAD's columns.",
                location=file,
                hint=_RECORD_HINT,
            )
        return read_squad(file)

    def read_unlabeled(self, file: str) -> list[Question]:
        """SQuAD JSON, whose answers are ignored, or a table with the columns question and context."""
        if file_suffix(file) == ".json":
            return read_squad(file, has_answers=False)
        columns = ("question", "context")
        hint = "use a table with the columns question and context, or a .json file in SQuAD's format."
        questions = []
        for number, row in enumerate(read_table(file, columns, column_hint=hint), 1):
            question, context = get_texts(row, columns, hint="correct the line.")
            questions.append(Question(str(number), question, context, (), row.location))
        return questions

    def has_labels(self, file: str) -> bool:
        """Whether a SQuAD file or records have ids and answers; other tables have none."""
        if has_records(file):
            return has_columns(file, ["id"]) and has_answers(file)
        return file_suffix(file) == ".json" and has_answers(file)

    def configure(self, config: PreTrainedConfig, train: Sequence[Question], validation: Sequence[Question]) -> None:
        """Record whether a question is unanswerable, and select the head."""
        self.has_unanswerable = any(not question.answers for question in (*train, *validation))
        if self.arguments.span_beam_search:
            config.architectures = [self._beam_search_class(config)]
        self.load_labels(config)

    def load_labels(self, config: PreTrainedConfig) -> None:
        """Record whether the model's head predicts spans by beam search."""
        heads = (family.alternative_heads.get(self.auto_class) for family in FAMILIES.values())
        if {head.__name__ for head in heads if head is not None} & {*(config.architectures or ())}:
            self.use_beam_search()

    def _beam_search_class(self, config: PreTrainedConfig) -> str:
        families = {
            family.config: family for family in FAMILIES.values() if self.auto_class in family.alternative_heads
        }
        if type(config) not in families:
            names = ", ".join(family.name for family in families.values())
            raise CtxError(
                f"A model with a {type(config).__name__} has no head that searches spans.",
                location="--span_beam_search",
                hint=f"remove it, or use a model of: {names}.",
            )
        return families[type(config)].alternative_heads[self.auto_class].__name__

    def use_beam_search(self) -> None:
        """Encode and decode for a head with beam search; call it before `encode`."""
        self.has_beam_search = True
        self.targets = ("start_positions", "end_positions", "is_impossible")
        self.position_outputs = ("start_top_index", "end_top_index")
        self.output_names = ("start_top_log_probs", "end_top_log_probs", *self.position_outputs, "cls_logits")
        self.has_token_outputs = False
        self.evaluation_arguments = {"return_spans": True}

    def encode(self, examples: Sequence[Question], tokenizer: PreTrainedTokenizerBase) -> Encoded:
        """Origins are `Window`s."""
        max_length = self.arguments.max_length
        stride = max_length // 3 if self.arguments.doc_stride is None else self.arguments.doc_stride
        questions = [example.question.lstrip() for example in examples]
        question_offsets = tokenizer(questions, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        questions = [
            question if len(offsets) <= MAX_QUESTION_TOKENS else question[: offsets[MAX_QUESTION_TOKENS - 1][1]]
            for question, offsets in zip(questions, question_offsets, strict=True)
        ]
        longest = max(len(ids) for ids in tokenizer(questions, add_special_tokens=False)["input_ids"])
        context_length = max_length - tokenizer.num_special_tokens_to_add(pair=True) - longest
        if stride >= context_length or stride < 0:
            stride_hint = f", or use a --doc_stride from 0 to {context_length - 1}" if context_length > 0 else ""
            raise CtxError(
                f"Windows of {max_length} tokens have {max(context_length, 0)} for the context next to the longest "
                f"question ({longest}), but consecutive windows share {stride}.",
                location="--max_length, --doc_stride",
                hint=f"raise --max_length{stride_hint}.",
            )
        encoding = tokenizer(
            questions,
            [example.context for example in examples],
            truncation="only_second",
            max_length=max_length,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        example_indices, offsets = encoding.pop("overflow_to_sample_mapping"), encoding.pop("offset_mapping")
        features, origins = [], []
        for index, example_index in enumerate(example_indices):
            sequence_ids = encoding.sequence_ids(index)
            if isinstance(tokenizer, CtxTaskNetworkTokenizer) and not {0, 1} <= set(sequence_ids):
                raise CtxError(
                    "The question or its context has no words, which a task network requires.",
                    location=examples[example_index].location,
                    hint="remove the question.",
                )
            is_context = np.array([sequence_id == 1 for sequence_id in sequence_ids])
            spans = np.where(is_context[:, None], np.array(offsets[index]), -1)
            _add_dropped_marks(spans, examples[example_index].context)
            ids = encoding["input_ids"][index]
            null = ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in ids else 0
            window = Window(example_index, null, spans)
            start, end = window.target(examples[example_index])
            feature = {name: encoding[name][index] for name in encoding}
            feature |= {"start_positions": start, "end_positions": end}
            if self.has_beam_search:
                p_mask = (~is_context).astype(np.int64)
                p_mask[null] = 0
                feature |= {"cls_index": null, "is_impossible": int((start, end) == (null, null)), "p_mask": p_mask}
            features.append(feature)
            origins.append(window)
        return Encoded(features, origins)

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Collator:
        """The collator of padded batches."""
        word_columns = {"p_mask": 1} if self.has_beam_search else {}
        return WordCollator(tokenizer, word_columns, ("start_positions", "end_positions", "cls_index"))

    def decode(self, examples: Sequence[Question], encoded: Encoded, outputs: Sequence[Logits]) -> list[AnswerSpan]:
        """The best span of each context."""
        best = [(-np.inf, "")] * len(examples)
        null = [np.inf] * len(examples)
        max_length = self.arguments.max_answer_length
        for window, output in zip(encoded.origins, outputs, strict=True):
            output = {name: values.astype(np.float64) for name, values in output.items()}
            index, allowed = window.example, window.spans[:, 0] >= 0
            if self.has_beam_search:
                null_score = float(output["cls_logits"])
                score, first, last = best_beam_span(output, allowed, max_length)
            else:
                start, end = output["start_logits"], output["end_logits"]
                null_score = start[window.null_position] + end[window.null_position]
                score, first, last = best_span(start, end, allowed, max_length)
            null[index] = min(null[index], null_score)
            if score > best[index][0]:
                best[index] = (score, examples[index].context[window.spans[first, 0] : window.spans[last, 1]])
        predictions = []
        for (score, text), null_score in zip(best, null, strict=True):
            margin = null_score - (0.0 if self.has_beam_search else score)
            is_unanswerable = self.has_unanswerable and margin > self.arguments.null_threshold
            predictions.append(AnswerSpan("" if is_unanswerable else text, float(expit(margin))))
        return predictions

    def results(
        self, examples: Sequence[Question], encoded: Encoded, outputs: Sequence[Logits]
    ) -> list[dict[str, Any]]:
        """Id, question, answer, and the probability that there is no answer."""
        return [
            {
                "id": question.id,
                "question": question.question,
                "answer": span.text,
                "no_answer_probability": span.no_answer_probability,
            }
            for question, span in zip(examples, self.decode(examples, encoded, outputs), strict=True)
        ]

    def score(self, examples: Sequence[Question], predictions: Sequence[AnswerSpan]) -> dict[str, float]:
        """Exact match and F1 in percent: SQuAD 2.0's if there are unanswerable questions, else SQuAD 1.1's."""
        texts = [prediction.text for prediction in predictions]
        answers = [[text for _, text in example.answers] for example in examples]
        score = metrics.squad_v2_scores if self.has_unanswerable or not all(answers) else metrics.squad_scores
        return score(texts, answers)

    def baseline(self, train: Sequence[Question], validation: Sequence[Question]) -> list[AnswerSpan]:
        """The first sentence of the context; no answer if most training questions have none."""
        if 2 * sum(not question.answers for question in train) > len(train):
            return [AnswerSpan("", 1.0)] * len(validation)
        return [AnswerSpan(question.context.split(". ")[0]) for question in validation]

    def record(self, example: Question, prediction: AnswerSpan) -> dict[str, Any]:
        """JSON object of an example for the predictions file."""
        return {
            "id": example.id,
            "answers": [text for _, text in example.answers],
            "prediction": prediction.text,
            "no_answer_probability": prediction.no_answer_probability,
        }


def _add_dropped_marks(spans: np.ndarray, context: str) -> None:
    """Extend each (tokens, 2) span of the context, in place, over following combining marks that no token covers:
    tokenizers that strip accents drop them, and an answer would end within a character."""
    if context.isascii():
        return
    positions = np.flatnonzero(spans[:, 0] >= 0)
    next_starts = [*spans[positions[1:], 0].tolist(), len(context)]
    for position, next_start in zip(positions, next_starts, strict=False):
        end = int(spans[position, 1])
        while end < next_start and category(context[end]).startswith("M"):
            end += 1
        spans[position, 1] = end


def best_span(start: np.ndarray, end: np.ndarray, allowed: np.ndarray, max_length: int) -> tuple[float, int, int]:
    """The highest start[i] + end[j] of (tokens,) logits with i <= j < i + max_length and both positions `allowed`:
    (score, i, j). The score is -inf if no position is allowed."""
    width = min(max_length, len(start))
    ends = np.concatenate([np.where(allowed, end, -np.inf), np.full(width - 1, -np.inf)])
    scores = np.where(allowed, start, -np.inf)[:, None] + np.lib.stride_tricks.sliding_window_view(ends, width)
    first, extra = np.unravel_index(int(scores.argmax()), scores.shape)
    return float(scores[first, extra]), int(first), int(first + extra)


def best_beam_span(output: Logits, allowed: np.ndarray, max_length: int) -> tuple[float, int, int]:
    """As `best_span`, among the spans of a beam search.

    `output` has the `start_top_index` (starts,) of the best starts with their probabilities `start_top_log_probs`, and
    the `end_top_index` (ends * starts,) of the best ends of each start, which varies fastest, with their probabilities
    given the start. The score is a log-probability.
    """
    starts, ends = output["start_top_index"].astype(int), output["end_top_index"].astype(int)
    ends_per_start = len(ends) // len(starts)
    starts = np.tile(starts, ends_per_start)
    probabilities = np.tile(output["start_top_log_probs"], ends_per_start) * output["end_top_log_probs"]
    is_valid = (starts >= 0) & (starts <= ends) & (ends < np.minimum(starts + max_length, len(allowed)))
    is_valid[is_valid] &= allowed[starts[is_valid]] & allowed[ends[is_valid]]
    with np.errstate(divide="ignore"):
        scores = np.where(is_valid, np.log(probabilities), -np.inf)
    best = int(scores.argmax())
    return float(scores[best]), int(starts[best]), int(ends[best])
