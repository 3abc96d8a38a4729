"""Token classification: a tag for every word (entities, chunks, parts of speech)."""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from transformers import DataCollatorForTokenClassification, PreTrainedConfig, PreTrainedTokenizerBase

from hf_ctxmodels.core.bio_tags import is_bio
from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.files import file_suffix
from hf_ctxmodels.data.record_files import class_names, has_records
from hf_ctxmodels.data.table_files import (
    MissingColumnError,
    TaggedSentence,
    has_labels,
    parse_strings,
    read_conll,
    read_conllu,
    read_table,
    split_cells,
    to_bio,
)
from hf_ctxmodels.data.text_files import read_text
from hf_ctxmodels.downstream.tasks import metrics
from hf_ctxmodels.downstream.tasks.base import (
    Encoded,
    LabeledTask,
    Logits,
    most_frequent,
    read_words,
    repeated_prediction,
)

Examples = Sequence[TaggedSentence]


def _is_conll(file: str, labels: Collection[str]) -> bool:
    """Whether the lines of a file are words in columns: all have the same number of fields, and either the last one is
    a label, or there are blank lines and a tab or a sentence of several lines."""
    text = read_text(file).strip(" \r\n")  # a tab may precede an empty tag
    delimiter = "\t" if "\t" in text.partition("\n")[0] else None
    lines = [split_cells(line, delimiter) if line.strip() else [] for line in text.split("\n")]
    if len({len(fields) for fields in lines if fields}) != 1:
        return False
    has_long_sentence = any(line and following for line, following in pairwise(lines))
    if [] in lines and (has_long_sentence or "\t" in text):
        return True
    return len(lines[0]) > 1 and all(fields[-1].strip() in labels for fields in lines if fields)


class TokenClassification(LabeledTask[TaggedSentence]):
    """One tag per word, from CoNLL columns, CoNLL-U, or JSONL with a list of words and a list of tags.

    The tag of a word is the target of its first sub-word. A sentence longer than `max_length` continues in further
    features. The prediction for a word without sub-words is `O`, or the first label if there is no `O`.
    """

    name = "token-classification"
    auto_class = "AutoModelForTokenClassification"
    collator_class = DataCollatorForTokenClassification
    has_unlabeled_loss = True
    split_words = True
    has_token_outputs = True
    class_names: Sequence[str] = ()
    """Names of the classes in the order of their numbers, of the first dataset that has them."""

    def read_file(self, file: str) -> list[TaggedSentence]:
        """Read the examples of a file."""
        if has_records(file):
            word_column, tag_column = self.arguments.text_columns or "tokens", self.arguments.label_column or "tags"
            self.class_names = self.class_names or class_names(file, tag_column)
            sentences = []
            for row in read_table(file, [word_column, tag_column]):
                values = row.values[word_column], row.values[tag_column]
                words, tags = map(parse_strings, values)
                if not len(words) == len(tags) > 0:
                    raise CtxError(
                        "Expected two lists of the same length, of texts or numbers; got "
                        f"{values[0]!r} and {values[1]!r}.",
                        location=row.location,
                        hint=f"write the words as {word_column!r} and a tag for each as {tag_column!r}.",
                    )
                sentences.append(TaggedSentence(words, tags, row.location))
            return to_bio(sentences)
        return self._read_columns(file)

    def _read_columns(self, file: str, labeled: bool = True) -> list[TaggedSentence]:
        """The sentences of a file with one word per line; unless `labeled`, the words are their tags."""
        word_column, tag_column = self.arguments.text_columns, self.arguments.label_column
        if file_suffix(file) == ".conllu":
            word_column = word_column or "FORM"
            return read_conllu(file, word_column, tag_column or "UPOS" if labeled else word_column)
        word_column = word_column or "1"
        tag_column = tag_column or "-1" if labeled else word_column
        try:
            columns = int(word_column), int(tag_column)
        except ValueError as error:
            raise CtxError(
                f"CoNLL columns have numbers, not names; got {word_column!r} and {tag_column!r}.",
                location=str(file),
                hint="pass --text_columns and --label_column as numbers (1 = first, -1 = last).",
            ) from error
        return read_conll(file, *columns)

    def read_unlabeled(self, file: str) -> list[TaggedSentence]:
        """A file as for `read_file`, whose tags are ignored; JSONL without tags, with lists of words or texts; or a
        `.txt` file with one sentence per line. Texts are split into words and punctuation marks."""
        column = self.arguments.text_columns or "tokens"
        if self._has_texts(file) or has_records(file):
            unlabeled = read_words(file, column, hint="correct the line, or pass another --text_columns.")
        else:
            unlabeled = [(sentence.words, sentence.location) for sentence in self._read_columns(file, labeled=False)]
        return [TaggedSentence(words, [self.labels[0]] * len(words), location) for words, location in unlabeled]

    def _has_texts(self, file: str) -> bool:
        """Whether the lines of a file are sentences instead of words."""
        return file_suffix(file) == ".txt" and not self.arguments.text_columns and not _is_conll(file, self.labels)

    def has_labels(self, file: str) -> bool:
        """Whether the words of a file have tags: not if there is no other column, or all tags are empty or `_`."""
        if has_records(file):
            return has_labels(file, self.arguments.label_column or "tags")
        if self._has_texts(file):
            return False
        try:
            tags = [sentence.tags for sentence in self._read_columns(file)]
        except MissingColumnError:
            return False
        words = [sentence.tags for sentence in self._read_columns(file, labeled=False)]
        return tags != words and any(tag not in ("", "_") for sentence in tags for tag in sentence)

    def configure(self, config: PreTrainedConfig, train: Examples, validation: Examples) -> None:
        """Set the labels from the training examples, in the order of a dataset's classes if it has all of them."""
        tags, validation_tags = ({tag for sentence in split for tag in sentence.tags} for split in (train, validation))
        if tags <= set(self.class_names):
            self._set_labels(config, self.class_names, validation_tags)
        elif is_bio(sorted(tags)):
            # Both prefixes of all types: a small training file may lack the `I-` of a type.
            types = sorted({tag[2:] for tag in tags if tag != "O"})
            labels = ["O", *(f"{prefix}-{type_}" for type_ in types for prefix in "BI")]
            self._set_labels(config, labels, validation_tags)
        else:
            self._set_labels(config, sorted(tags), validation_tags)
        if len(self.labels) < 2:
            raise CtxError(
                f"All training words have the tag {self.labels[0]!r}; a tagger needs two tags or more.",
                location="--train_file",
                hint="add sentences with other tags, or pass another --label_column.",
            )

    def encode(self, examples: Examples, tokenizer: PreTrainedTokenizerBase) -> Encoded:
        """Origins are (example index, {position of a first sub-word: word index})."""
        targets = [[self._label_id(tag, sentence.location) for tag in sentence.tags] for sentence in examples]
        encoding = tokenizer(
            [sentence.words for sentence in examples],
            is_split_into_words=True,
            truncation=True,
            max_length=self.arguments.max_length,
            return_overflowing_tokens=True,
        )
        example_indices = encoding.pop("overflow_to_sample_mapping")
        features, origins = [], []
        last_words: dict[int, int] = defaultdict(lambda: -1)  # example -> the last word with a target so far
        for i, example_index in enumerate(example_indices):
            positions: dict[int, int] = {}
            for position, word in enumerate(encoding.word_ids(i)):
                if word is not None and word > last_words[example_index]:
                    positions[position] = last_words[example_index] = word
            if not positions:
                continue  # within a word that is longer than a window
            labels = [IGNORE_INDEX] * len(encoding["input_ids"][i])
            for position, word in positions.items():
                labels[position] = targets[example_index][word]
            extra_inputs = self.extra_inputs(examples[example_index], encoding.word_ids(i))
            features.append({name: encoding[name][i] for name in encoding} | extra_inputs | {"labels": labels})
            origins.append((example_index, positions))
        return Encoded(features, origins)

    def extra_inputs(self, example: TaggedSentence, word_ids: Sequence[int | None]) -> dict[str, list[int]]:
        """Further inputs of a feature, from the word of each of its tokens; by default none."""
        return {}

    def decode(self, examples: Examples, encoded: Encoded, outputs: Sequence[Logits]) -> list[list[str]]:
        """The tags of each example."""
        default_tag = "O" if "O" in self.labels else self.labels[0]
        predictions = [[default_tag] * len(sentence.words) for sentence in examples]
        for (example_index, positions), output in zip(encoded.origins, outputs, strict=True):
            best = np.asarray(output["logits"]).argmax(axis=-1)
            for position, word in positions.items():
                predictions[example_index][word] = self.labels[int(best[position])]
        return predictions

    def results(self, examples: Examples, encoded: Encoded, outputs: Sequence[Logits]) -> list[dict[str, Any]]:
        """Words and their tags."""
        predictions = self.decode(examples, encoded, outputs)
        return [{"words": example.words, "tags": tags} for example, tags in zip(examples, predictions, strict=True)]

    def score(self, examples: Examples, predictions: Sequence[list[str]]) -> dict[str, float]:
        """F1, precision and recall of entities and accuracy of BIO tags; accuracy and macro F1 of other tags."""
        references = [sentence.tags for sentence in examples]
        if is_bio(self.labels):
            return metrics.entity_scores(predictions, references)
        predicted = [self.labels.index(tag) for tags in predictions for tag in tags]
        expected = [self._label_id(tag, sentence.location) for sentence in examples for tag in sentence.tags]
        return {"accuracy": metrics.accuracy(predicted, expected), "f1_macro": metrics.macro_f1(predicted, expected)}

    def constant_prediction(self, examples: Examples, predictions: Sequence[list[str]]) -> str | None:
        """The tag of all words."""
        tags = [tag for sentence in examples for tag in sentence.tags]
        return repeated_prediction([tag for prediction in predictions for tag in prediction], tags)

    def baseline(self, train: Examples, validation: Examples) -> list[list[str]]:
        """The most frequent tag of each word in the training file; for unknown words, of all words."""
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for sentence in train:
            for word, tag in zip(sentence.words, sentence.tags, strict=True):
                counts[word][tag] += 1
        best = {word: counter.most_common(1)[0][0] for word, counter in counts.items()}
        overall = most_frequent(tag for sentence in train for tag in sentence.tags)
        return [[best.get(word, overall) for word in sentence.words] for sentence in validation]

    def record(self, example: TaggedSentence, prediction: list[str]) -> dict[str, Any]:
        """JSON object of an example for the predictions file."""
        return {"location": example.location, "words": example.words, "label": example.tags, "prediction": prediction}
