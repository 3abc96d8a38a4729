"""Semantic role labeling: the arguments of a given predicate as spans of words (Carreras & Marquez 2005)."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hf_ctxmodels.core.bio_tags import is_bio
from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.files import file_suffix
from hf_ctxmodels.data.propositions import Proposition, column_numbers, read_propositions
from hf_ctxmodels.data.record_files import has_records
from hf_ctxmodels.data.table_files import TaggedSentence, has_labels, iob1_to_bio, line_blocks, split_cells
from hf_ctxmodels.downstream.networks.configuration import CtxTaskNetworkConfig
from hf_ctxmodels.downstream.tasks import metrics
from hf_ctxmodels.downstream.tasks.base import Encoded, Logits
from hf_ctxmodels.downstream.tasks.token_classification import TokenClassification
from hf_ctxmodels.layers.crf import Constraints, Scores, viterbi

Examples = Sequence[TaggedSentence]
PREDICATE_MARKER = "*"
"""Word before the predicate, for models without two segments."""
PREDICATE_SIZE = 100
"""Width of the embeddings of the predicate in a new task network, as in AllenNLP's tagger (He et al. 2017)."""
_DEFAULT_SCORES = {"O": 0.0, "I": -1e-3, "B": -2e-3}  # preference among equal tags
_DECODING_BATCH = 256  # sentences per batch of the Viterbi algorithm
_WINDOW = 8  # words on each side of the predicate that the baseline labels


class SemanticRoleLabeling(TokenClassification):
    """The arguments of each predicate as BIO tags, with the predicate marked in the input.

    A model with two or more segments (`config.type_vocab_size`) reads the predicate as segment 1, as in AllenNLP's BERT
    tagger, a task network reads an embedding of it (`predicate_size` of its options), and other models read the word
    `*` before the predicate. The tags are decoded by the Viterbi algorithm under the constraints of BIO (He et al.
    2017, section 2.2). In a sentence that is longer than `max_length`, only the window with the predicate has the mark.
    """

    name = "semantic-role-labeling"
    argument_names = (*TokenClassification.argument_names, "head_column")
    has_unlabeled_loss = False
    marks_by_token_type = False
    """Whether `token_type_ids` of 1 mark the predicate, not the word `*`; after `configure` or `load_labels`."""

    def _file_columns(self, file: str) -> tuple[str, str]:
        """The columns of the words, and of the rolesets or tags."""
        if has_records(file):
            words, labels = "tokens", "tags"
        else:
            words, labels = "2", "10" if file_suffix(file) == ".conllu" else "6"
        return self.arguments.text_columns or words, self.arguments.label_column or labels

    def _read(self, file: str, labeled: bool) -> list[Proposition]:
        words, labels = self._file_columns(file)
        head_column = None if file_suffix(file) == ".conllu" else self.arguments.head_column
        return read_propositions(file, words, labels, head_column=head_column, labeled=labeled)

    def read_file(self, file: str) -> list[TaggedSentence]:
        """The propositions of a file."""
        return [*self._read(file, labeled=True)]

    def read_unlabeled(self, file: str) -> list[TaggedSentence]:
        """Propositions without arguments, of a file as for `read_file`, whose columns of arguments may be missing."""
        return [*self._read(file, labeled=False)]

    def has_labels(self, file: str) -> bool:
        """Whether a file has columns of arguments after the rolesets, or tags in JSON lines; raises CtxError for a
        column that is not a number."""
        words, labels = self._file_columns(file)
        if has_records(file):
            return has_labels(file, labels)
        _, roleset_column = column_numbers(words, labels, file)
        lines = [line for block in line_blocks(file) for _, line in block if not line.startswith("#")]
        return any(len(split_cells(line, "\t" if "\t" in line else None)) > roleset_column for line in lines)

    def configure(self, config: PreTrainedConfig, train: Examples, validation: Examples) -> None:
        """Set the labels of the training and validation examples: rare roles may be missing in training."""
        super().configure(config, [*train, *validation], validation)
        if isinstance(config, CtxTaskNetworkConfig):
            config.network_options = {"predicate_size": PREDICATE_SIZE, **(config.network_options or {})}
        self._select_marking(config)

    def load_labels(self, config: PreTrainedConfig) -> None:
        """Set the labels to the names in the configuration; raises CtxError if they are not BIO tags."""
        super().load_labels(config)
        if not is_bio(self.labels):
            raise CtxError(
                f"The labels of the model are not BIO tags: {', '.join(self.labels)}.",
                location=f"the task {self.name}",
                hint="use a model of `finetune semantic-role-labeling`, or the task token-classification.",
            )
        self._select_marking(config)

    def _select_marking(self, config: PreTrainedConfig) -> None:
        if isinstance(config, CtxTaskNetworkConfig):
            self.marks_by_token_type = bool((config.network_options or {}).get("predicate_size"))
        else:
            self.marks_by_token_type = (getattr(config, "type_vocab_size", None) or 0) >= 2

    def _label_id(self, label: str, location: str) -> int:
        """The id of a label; a role of an evaluation file that the model lacks is ignored in the loss, and missed in
        the score."""
        return self.labels.index(label) if label in self.labels else IGNORE_INDEX

    def encode(self, examples: Sequence[Any], tokenizer: PreTrainedTokenizerBase) -> Encoded:
        """As `TokenClassification.encode`, with the mark of the predicate; raises CtxError if the tokenizer lacks the
        marker."""
        if self.marks_by_token_type:
            return super().encode(examples, tokenizer)
        _check_marker(tokenizer)
        encoded = super().encode([_with_marker(example) for example in examples], tokenizer)
        origins = []
        for feature, (index, positions) in zip(encoded.features, encoded.origins, strict=True):
            marker = examples[index].predicate
            for position, word in positions.items():
                if word == marker:
                    feature["labels"][position] = IGNORE_INDEX
            words = {position: word - (word > marker) for position, word in positions.items() if word != marker}
            origins.append((index, words))
        return Encoded(encoded.features, origins)

    def extra_inputs(self, example: Any, word_ids: Sequence[int | None]) -> dict[str, list[int]]:
        """Segment 1 for the tokens of the predicate."""
        if not self.marks_by_token_type:
            return {}
        return {"token_type_ids": [int(word == example.predicate) for word in word_ids]}

    def decode(self, examples: Examples, encoded: Encoded, outputs: Sequence[Logits]) -> list[list[str]]:
        """The best valid tags of each example; a word without sub-words is `O`, or continues an argument that the next
        word continues."""
        default = torch.tensor([_DEFAULT_SCORES[label[0]] for label in self.labels])
        emissions = [default.repeat(len(example.words), 1) for example in examples]
        for (index, positions), output in zip(encoded.origins, outputs, strict=True):
            emissions[index][[*positions.values()]] = torch.as_tensor(output["logits"][[*positions]]).float()
        transitions, starts = Constraints.bio(self.labels).scores(torch.device("cpu"))
        scores = Scores(transitions, starts, torch.zeros(len(self.labels)))
        predictions = []
        for start in range(0, len(emissions), _DECODING_BATCH):
            sentences = emissions[start : start + _DECODING_BATCH]
            masks = [torch.ones(len(sentence), dtype=torch.bool) for sentence in sentences]
            batch, is_word = pad_sequence(sentences, batch_first=True), pad_sequence(masks, batch_first=True)
            tags = viterbi(batch, is_word, scores)
            predictions += [
                [self.labels[tag] for tag in row[mask].tolist()] for row, mask in zip(tags, is_word, strict=True)
            ]
        return predictions

    def results(self, examples: Sequence[Any], encoded: Encoded, outputs: Sequence[Logits]) -> list[dict[str, Any]]:
        """Words, the index of the predicate, and the tags."""
        tags = self.decode(examples, encoded, outputs)
        return [
            {"words": example.words, "predicate": example.predicate, "tags": example_tags}
            for example, example_tags in zip(examples, tags, strict=True)
        ]

    def score(self, examples: Examples, predictions: Sequence[list[str]]) -> dict[str, float]:
        """F1, precision and recall of arguments, as in CoNLL-2005."""
        return metrics.argument_scores(predictions, [example.tags for example in examples])

    def baseline(self, train: Sequence[Any], validation: Sequence[Any]) -> list[list[str]]:
        """For each word within 8 words of the predicate, the most frequent role of the word at this side of the
        predicate, or of all words at this distance; neighboring words of one role are one argument."""
        counts: dict[Any, Counter[str]] = defaultdict(Counter)
        for example in train:
            for index, (word, tag) in enumerate(zip(example.words, example.tags, strict=True)):
                distance = index - example.predicate
                if abs(distance) <= _WINDOW:
                    counts[word.lower(), distance > 0][tag[2:]] += 1
                    counts[distance][tag[2:]] += 1
        best = {key: counter.most_common(1)[0][0] for key, counter in counts.items() if counter.total() >= 3}
        predictions = []
        for example in validation:
            roles = []
            for index, word in enumerate(example.words):
                distance = index - example.predicate
                role = best.get((word.lower(), distance > 0), best.get(distance, ""))
                roles.append(role if 0 < abs(distance) <= _WINDOW else "")
            roles[example.predicate] = "V"
            predictions.append(iob1_to_bio([f"I-{role}" if role else "O" for role in roles]))
        return predictions

    def record(self, example: Any, prediction: list[str]) -> dict[str, Any]:
        """JSON object of an example for the predictions file."""
        return super().record(example, prediction) | {"predicate": example.predicate, "roleset": example.roleset}


def _with_marker(example: Proposition) -> Proposition:
    index = example.predicate
    words = [*example.words[:index], PREDICATE_MARKER, *example.words[index:]]
    tags = [*example.tags[:index], "O", *example.tags[index:]]
    return replace(example, words=words, tags=tags, predicate=index + 1)


def _check_marker(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer([[PREDICATE_MARKER]], is_split_into_words=True, add_special_tokens=False)["input_ids"][0]
    if not ids or [*ids] == [tokenizer.unk_token_id]:
        raise CtxError(
            f"The model has no segments, and the tokenizer does not know the mark of predicates, {PREDICATE_MARKER!r}.",
            location=tokenizer.name_or_path,
            hint="use a tokenizer with this word, or a model with type_vocab_size=2.",
        )
