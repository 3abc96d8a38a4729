"""Coreference resolution: the spans of a text that mention the same entity."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
from accelerate import PartialState
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hf_ctxmodels.architectures.word_alignment import split_words
from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.constants import IGNORE_INDEX
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.data.coreference_files import CoreferenceDocument, Span, read_coreference
from hf_ctxmodels.data.files import file_suffix
from hf_ctxmodels.data.table_files import line_blocks
from hf_ctxmodels.downstream.networks.coreference import CoreferenceOptions
from hf_ctxmodels.downstream.tasks.base import Collator, Encoded, Logits, Task, WordCollator
from hf_ctxmodels.downstream.tasks.coreference_metrics import coreference_scores

Clusters = list[list[Span]]
Examples = Sequence[CoreferenceDocument]


class Coreference(Task[CoreferenceDocument]):
    """Clusters of mentions, from CoNLL-2012 columns, CoNLL-U with `Entity` in MISC, or JSONL, see
    `data.coreference_files`.

    Documents are divided into windows of sentences of at most `max_length` words, which are the examples: a cluster
    does not reach across windows. Clusters of one mention are left out, as in CoNLL-2012.
    """

    name = "coreference"
    auto_class = "AutoModelForCoreference"
    output_names = ("spans", "antecedents")
    split_words = True
    required_inputs = ("sentence_ids",)
    argument_names = ("max_length",)
    baseline_name = "head match: mentions of the training file and names are coreferent if their last words are equal"

    max_span_width: int = CoreferenceOptions.max_span_width

    def read_file(self, file: str) -> list[CoreferenceDocument]:
        """Read the windows of a file's documents; raises CtxError if no cluster has two mentions."""
        examples = [
            replace(window, clusters=[cluster for cluster in window.clusters if len(cluster) > 1])
            for document in read_coreference(file)
            for window in document.windows(self.arguments.max_length)
        ]
        if not any(example.clusters for example in examples):
            raise CtxError("No cluster has two mentions.", location=file, hint="use a file with coreference clusters.")
        return examples

    def read_unlabeled(self, file: str) -> list[CoreferenceDocument]:
        """As `read_file`, without clusters; or a `.txt` file with a sentence per line, which is split into words and
        punctuation marks, and a blank line after each document."""
        if file_suffix(file) == ".txt":
            blocks = [[split_words(line) for _, line in block] for block in line_blocks(file)]
            documents = [
                CoreferenceDocument(f"document {number}", [*filter(None, sentences)], [], file)
                for number, sentences in enumerate(blocks, 1)
            ]
        else:
            documents = read_coreference(file, labeled=False)
        windows = (window for document in documents for window in document.windows(self.arguments.max_length))
        return [replace(window, clusters=[]) for window in windows]

    def has_labels(self, file: str) -> bool:
        """Whether a file has a cluster of two mentions."""
        if file_suffix(file) == ".txt":
            return False
        return any(len(cluster) > 1 for document in read_coreference(file) for cluster in document.clusters)

    def load_labels(self, config: PreTrainedConfig) -> None:
        """Set the longest span to the network's."""
        options = getattr(config, "network_options", None)
        if not isinstance(options, Mapping):
            raise CtxError(
                f"{type(config).__name__} is not a network for coreference.",
                location=f"the task {self.name}",
                hint="give the models as features of a network, --features NAME=DIR.",
            )
        self.max_span_width = options.get("max_span_width", CoreferenceOptions.max_span_width)

    def configure(self, config: PreTrainedConfig, train: Examples, validation: Examples) -> None:
        """Set the longest span, and print the number of mentions that are longer."""
        self.load_labels(config)
        mentions = (span for document in (*train, *validation) for cluster in document.clusters for span in cluster)
        lengths = [end - first for first, end in mentions]
        num_long = sum(length > self.max_span_width for length in lengths)
        print_status(
            f"{num_long:,} of {len(lengths):,} mentions are longer than {self.max_span_width} words and cannot be "
            "predicted",
            num_long > 0 and PartialState().is_main_process,
        )

    def encode(self, examples: Examples, tokenizer: PreTrainedTokenizerBase) -> Encoded:
        """Tokenize the windows; raises CtxError for a tokenizer whose tokens are not words."""
        features = []
        for document in examples:
            words = document.words
            encoding = tokenizer([words], is_split_into_words=True)
            if encoding.word_ids(0) != list(range(len(words))):
                raise CtxError(
                    f"The tokens of {type(tokenizer).__name__} are not words.",
                    location=f"the task {self.name}",
                    hint="use a network on word vectors.",
                )
            labels = np.full((len(words), self.max_span_width), IGNORE_INDEX)
            for cluster, mentions in enumerate(document.clusters):
                for first, end in self._reachable(mentions):
                    labels[first, end - first - 1] = cluster
            sentence_ids = [number for number, sentence in enumerate(document.sentences) for _ in sentence]
            inputs = {name: values[0] for name, values in encoding.items() if name != "token_type_ids"}
            features.append({**inputs, "sentence_ids": sentence_ids, "labels": labels})
        return Encoded(features)

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Collator:
        """The collator of padded batches."""
        return WordCollator(tokenizer, {"sentence_ids": 0, "labels": IGNORE_INDEX})

    def decode(self, examples: Examples, encoded: Encoded, outputs: Sequence[Logits]) -> list[Clusters]:
        """The clusters of each window."""
        return [link_clusters(output["spans"].astype(int), output["antecedents"].astype(int)) for output in outputs]

    def score(self, examples: Examples, predictions: Sequence[Clusters]) -> dict[str, float]:
        """The CoNLL score, and its parts."""
        return coreference_scores(predictions, [document.clusters for document in examples])

    def upper_bounds(self, examples: Examples) -> dict[str, float]:
        """The metrics without mentions that are too long, if there are any."""
        reachable = [[self._reachable(cluster) for cluster in document.clusters] for document in examples]
        reachable = [[cluster for cluster in clusters if len(cluster) > 1] for clusters in reachable]
        scores = self.score(examples, reachable)
        return scores if scores["conll_f1"] < 1 else {}

    def baseline(self, train: Examples, validation: Examples) -> list[Clusters]:
        """Head match: mentions whose last words are equal are coreferent.

        Mentions are the longest phrases that are mentions in at least half of their occurrences in the training file,
        and otherwise the longest sequences of capitalized words after the first word of a sentence.
        """
        mention_counts: Counter[str] = Counter()
        for document in train:
            words = [word.lower() for word in document.words]
            mention_counts.update(" ".join(words[first:end]) for first, end in chain.from_iterable(document.clusters))
        occurrences: Counter[str] = Counter()
        for sentence in chain.from_iterable(document.sentences for document in train):
            words = [word.lower() for word in sentence]
            for first in range(len(words)):
                ends = range(first + 1, min(len(words), first + self.max_span_width) + 1)
                occurrences.update(phrase for end in ends if (phrase := " ".join(words[first:end])) in mention_counts)
        phrases = {phrase for phrase, count in mention_counts.items() if 2 * count >= occurrences[phrase]}
        return [head_match(document, find_mentions(document, phrases, self.max_span_width)) for document in validation]

    def constant_prediction(self, examples: Examples, predictions: Sequence[Clusters]) -> str | None:
        """ "no cluster" if no window has one."""
        return None if any(predictions) else "no cluster"

    def record(self, example: CoreferenceDocument, prediction: Clusters) -> dict[str, Any]:
        """JSON object of a window for the predictions file; spans are [first, last] words."""
        label = _inclusive(example.clusters)
        return {
            "location": example.location, "doc_key": example.name, "sentences": example.sentences, "label": label,
            "prediction": _inclusive(prediction),
        }  # fmt: skip

    def results(self, examples: Examples, encoded: Encoded, outputs: Sequence[Logits]) -> list[dict[str, Any]]:
        """The sentences of each window, its clusters of [first, last] words, which `read_file` can read, and their
        texts."""
        results = []
        for document, clusters in zip(examples, self.decode(examples, encoded, outputs), strict=True):
            words = document.words
            texts = [[" ".join(words[first:end]) for first, end in cluster] for cluster in clusters]
            results.append(
                {
                    "doc_key": document.name,
                    "sentences": document.sentences,
                    "clusters": _inclusive(clusters),
                    "texts": texts,
                }
            )
        return results

    def _reachable(self, mentions: Iterable[Span]) -> list[Span]:
        return [(first, end) for first, end in mentions if end - first <= self.max_span_width]


def link_clusters(spans: np.ndarray, antecedents: np.ndarray) -> Clusters:
    """The clusters of (spans, 2) spans, in order, and the index of the antecedent of each; -1 for none. Spans without
    antecedent that are not the antecedent of another span are in no cluster."""
    cluster_of: dict[int, list[Span]] = {}
    clusters = []
    for index, antecedent in enumerate(antecedents.tolist()):
        if antecedent >= 0:
            if antecedent not in cluster_of:
                cluster_of[antecedent] = [tuple(spans[antecedent].tolist())]
                clusters.append(cluster_of[antecedent])
            cluster_of[index] = cluster_of[antecedent]
            cluster_of[index].append(tuple(spans[index].tolist()))
    return clusters


def head_match(document: CoreferenceDocument, mentions: Iterable[Span]) -> Clusters:
    """Clusters of two or more mentions whose last words are equal, ignoring case."""
    words = document.words
    clusters: dict[str, list[Span]] = defaultdict(list)
    for first, end in sorted(mentions):
        clusters[words[end - 1].lower()].append((first, end))
    return [cluster for cluster in clusters.values() if len(cluster) > 1]


def find_mentions(document: CoreferenceDocument, phrases: set[str], max_width: int) -> list[Span]:
    """The longest phrases of a document that are among `phrases`, in lower case, from left to right, and the longest
    sequences of capitalized words between them, without the first word of a sentence."""
    mentions = []
    offset = 0
    for sentence in document.sentences:
        words = [word.lower() for word in sentence]
        first = 0
        while first < len(words):
            ends = range(min(len(words), first + max_width), first, -1)
            end = next((end for end in ends if " ".join(words[first:end]) in phrases), first)
            if end == first and first > 0:
                while end < len(words) and end < first + max_width and sentence[end][:1].isupper():
                    end += 1
            if end > first:
                mentions.append((offset + first, offset + end))
            first = max(end, first + 1)
        offset += len(words)
    return mentions


def _inclusive(clusters: Iterable[Iterable[Span]]) -> list[list[list[int]]]:
    return [[[first, end - 1] for first, end in cluster] for cluster in clusters]
