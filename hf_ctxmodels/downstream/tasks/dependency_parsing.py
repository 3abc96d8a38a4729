"""Dependency parsing: the syntactic head and the relation of each word."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hf_ctxmodels.core.constants import IGNORE_INDEX, ROOT_HEAD
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.treebanks import is_treebank, read_treebank
from hf_ctxmodels.downstream.tasks.base import (
    Collator,
    Encoded,
    LabeledTask,
    Logits,
    WordCollator,
    most_frequent,
    read_words,
    repeated_prediction,
)
from hf_ctxmodels.downstream.tasks.dependency_trees import best_tree

_UNLABELED = "_"  # relation without annotation


@dataclass(frozen=True)
class DependencyTree:
    """The words of a sentence with their heads, indices of words or -1 for the root, and relations.

    Attributes:
        location: `file:line` of the first word.
    """

    words: list[str]
    heads: list[int]
    relations: list[str]
    location: str


Examples = Sequence[DependencyTree]
Edges = tuple[list[int], list[str]]
"""Predicted heads and relations of the words of a sentence."""


class DependencyParsing(LabeledTask[DependencyTree]):
    """The head and the relation of each word, from CoNLL-U (columns HEAD and DEPREL).

    Sentences are not divided: one of more than `max_length` tokens is an error. Predictions are trees with exactly one
    word whose head is the root. The metrics are as in the CoNLL 2018 shared task, on the words of the file: all words
    count, including punctuation, and subtypes of relations (`nmod:poss`) are ignored.
    """

    name = "dependency-parsing"
    auto_class = "AutoModelForDependencyParsing"
    targets = ("labels", "heads")
    output_names = ("arc_scores", "arc_relations")
    split_words = True
    has_token_outputs = True
    has_unlabeled_loss = True
    required_inputs = ("heads",)
    argument_names = ("max_length",)

    def read_file(self, file: str) -> list[DependencyTree]:
        """Read the trees of a file; raises CtxError unless it is CoNLL-U, and each sentence has a tree."""
        if not is_treebank(file):
            raise CtxError(
                "Dependency trees are read from CoNLL-U.", location=file, hint="use a file with the suffix .conllu."
            )
        trees = []
        for sentence in read_treebank(file):
            sentence.depths()  # raises an error unless the heads are a tree
            if _UNLABELED in sentence.relations:
                index = sentence.relations.index(_UNLABELED)
                raise CtxError(
                    f"Word {index + 1} ({sentence.words[index]}) has no relation.",
                    location=sentence.location,
                    hint="write it into the column DEPREL.",
                )
            trees.append(DependencyTree(sentence.words, sentence.heads, sentence.relations, sentence.location))
        return trees

    def read_unlabeled(self, file: str) -> list[DependencyTree]:
        """The words of a CoNLL-U file, of a `.txt` file with one sentence per line, which is split into words and
        punctuation marks, or of JSONL with lists of words or texts as `tokens`."""
        if is_treebank(file):
            sentences = [(sentence.words, sentence.location) for sentence in read_treebank(file)]
        else:
            sentences = read_words(file, "tokens", hint="correct it.")
        return [
            DependencyTree(words, [ROOT_HEAD] * len(words), [self.labels[0]] * len(words), location)
            for words, location in sentences
        ]

    def has_labels(self, file: str) -> bool:
        """Whether a file is CoNLL-U with relations."""
        return is_treebank(file) and any(
            relation != _UNLABELED for sentence in read_treebank(file) for relation in sentence.relations
        )

    def configure(self, config: PreTrainedConfig, train: Examples, validation: Examples) -> None:
        """Set the labels to the relations of both files: rare relations may be missing in training."""
        relations = sorted({relation for tree in (*train, *validation) for relation in tree.relations})
        self._set_labels(config, relations, ())

    def encode(self, examples: Examples, tokenizer: PreTrainedTokenizerBase) -> Encoded:
        """Origins are the positions of the first sub-words of an example, counted from the end (negative) with padding
        on the left. Raises CtxError for a sentence that is longer than `max_length`, and for words without tokens."""
        features, origins = [], []
        limit = self.arguments.max_length
        for tree in examples:
            encoding = tokenizer([tree.words], is_split_into_words=True)
            word_ids = encoding.word_ids(0)
            if len(word_ids) > limit:
                raise CtxError(
                    f"The sentence has {len(word_ids)} tokens, more than --max_length {limit}.",
                    location=tree.location,
                    hint=f"use --max_length {len(word_ids)}, or divide the sentence.",
                )
            positions = [word_ids.index(word) for word in range(len(tree.words)) if word in word_ids]
            if len(positions) < len(tree.words):
                raise CtxError(
                    f"{type(tokenizer).__name__} has no token for a word of the sentence.",
                    location=tree.location,
                    hint="correct the word, or use another tokenizer.",
                )
            labels, heads = [IGNORE_INDEX] * len(word_ids), [ROOT_HEAD] * len(word_ids)
            for position, relation, head in zip(positions, tree.relations, tree.heads, strict=True):
                labels[position] = self._label_id(relation, tree.location)
                heads[position] = ROOT_HEAD if head == ROOT_HEAD else positions[head]
            inputs = {name: values[0] for name, values in encoding.items() if name != "token_type_ids"}
            features.append({**inputs, "labels": labels, "heads": heads})
            offset = len(word_ids) if tokenizer.padding_side == "left" else 0
            origins.append([position - offset for position in positions])
        return Encoded(features, origins)

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Collator:
        """The collator of padded batches."""
        return WordCollator(tokenizer, {"labels": IGNORE_INDEX, "heads": ROOT_HEAD}, ("heads",))

    def decode(self, examples: Examples, encoded: Encoded, outputs: Sequence[Logits]) -> list[Edges]:
        """The best tree of each example, and the best relation to each head."""
        predictions = []
        for positions, output in zip(encoded.origins, outputs, strict=True):
            # column 0 is the root
            columns = [0, *(position if position < 0 else 1 + position for position in positions)]
            scores, relations = (np.asarray(output[name])[np.ix_(positions, columns)] for name in self.output_names)
            heads = best_tree(scores.astype(np.float64))
            names = [self.labels[int(relations[word, 1 + head])] for word, head in enumerate(heads)]
            predictions.append((heads, names))
        return predictions

    def score(self, examples: Examples, predictions: Sequence[Edges]) -> dict[str, float]:
        """Labeled and unlabeled attachment score, 0 to 1, over all words."""
        return attachment_scores(predictions, [(tree.heads, tree.relations) for tree in examples])

    def baseline(self, train: Examples, validation: Examples) -> list[Edges]:
        """The previous word as head, or the next word, whichever is better in training, with the most frequent relation
        of words with this head; the root at the border of the sentence."""
        root_relation = most_frequent(relation for tree in train for relation in _attached_relations(tree, None))
        predictions: dict[str, list[Edges]] = {}
        training_scores: dict[str, float] = {}
        for name, offset in (("previous", -1), ("next", 1)):
            relations = [relation for tree in train for relation in _attached_relations(tree, offset)]
            relation = most_frequent(relations) if relations else root_relation
            names = relation, root_relation
            training_scores[name] = self.score(train, [_chain(tree, offset, *names) for tree in train])["las"]
            predictions[name] = [_chain(tree, offset, *names) for tree in validation]
        best = max(training_scores, key=lambda name: training_scores[name])
        self.baseline_name = f"the head of each word is the {best} word, with the most frequent relation"
        return predictions[best]

    def constant_prediction(self, examples: Examples, predictions: Sequence[Edges]) -> str | None:
        """The relation of all words."""
        relations = chain.from_iterable(tree.relations for tree in examples)
        return repeated_prediction([*chain.from_iterable(names for _, names in predictions)], relations)

    def record(self, example: DependencyTree, prediction: Edges) -> dict[str, Any]:
        """JSON object of an example for the predictions file; heads are counted from 1, 0 is the root."""
        label, predicted = (_numbered(*edges) for edges in ((example.heads, example.relations), prediction))
        return {"location": example.location, "words": example.words, "label": label, "prediction": predicted}

    def results(self, examples: Examples, encoded: Encoded, outputs: Sequence[Logits]) -> list[dict[str, Any]]:
        """Words, heads and relations; heads are counted from 1, 0 is the root."""
        predictions = self.decode(examples, encoded, outputs)
        return [{"words": tree.words, **_numbered(*edges)} for tree, edges in zip(examples, predictions, strict=True)]


def attachment_scores(predictions: Sequence[Edges], references: Sequence[Edges]) -> dict[str, float]:
    """Labeled (`las`) and unlabeled (`uas`) attachment score: the share of words with the correct head, and for `las`
    with the correct relation, without subtype.

    >>> attachment_scores([([-1, 0, 1], ["root", "obj", "nmod:poss"])], [([-1, 0, 0], ["root", "obl", "nmod"])])
    {'las': 0.3333333333333333, 'uas': 0.6666666666666666}
    """
    num_words = num_heads = num_edges = 0
    for (heads, relations), (expected_heads, expected_relations) in zip(predictions, references, strict=True):
        for head, relation, expected_head, expected_relation in zip(
            heads, relations, expected_heads, expected_relations, strict=True
        ):
            num_words += 1
            num_heads += head == expected_head
            num_edges += head == expected_head and _universal(relation) == _universal(expected_relation)
    return {"las": num_edges / num_words, "uas": num_heads / num_words}


def _universal(relation: str) -> str:
    """A relation without its subtype."""
    return relation.partition(":")[0]


def _attached_relations(tree: DependencyTree, offset: int | None) -> list[str]:
    """The relations of the words whose head is at this offset; None for the root."""
    return [
        relation
        for word, (head, relation) in enumerate(zip(tree.heads, tree.relations, strict=True))
        if (offset is None if head == ROOT_HEAD else head - word == offset)
    ]


def _chain(tree: DependencyTree, offset: int, relation: str, root_relation: str) -> Edges:
    """The head of each word is the word at this offset, of the first or last word the root."""
    heads = [word + offset for word in range(len(tree.words))]
    heads = [head if head in range(len(heads)) else ROOT_HEAD for head in heads]
    return heads, [root_relation if head == ROOT_HEAD else relation for head in heads]


def _numbered(heads: Iterable[int], relations: Sequence[str]) -> dict[str, list[Any]]:
    """Heads and relations as in CoNLL-U, with heads counted from 1 and 0 for the root."""
    return {"heads": [head - ROOT_HEAD for head in heads], "relations": [*relations]}
