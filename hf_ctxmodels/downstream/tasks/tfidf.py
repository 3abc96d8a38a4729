"""The learned baseline of tasks on texts: a linear model of TF-IDF features, by scikit-learn."""

import random
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import regex

from hf_ctxmodels.core.word_patterns import LETTER

MAX_TEXTS, MAX_FEATURES, MAX_CHARACTERS = 10_000, 50_000, 1_000
TFIDF_NOTE = (
    "TF-IDF: logistic or ridge regression on TF-IDF features of words "
    f"({MAX_FEATURES:,} features, at most {MAX_TEXTS:,} training examples)"
)
# a Chinese or Japanese character is a word
_WORDS = regex.compile(rf"[\u3040-\u30ff\u3400-\u9fff]|{LETTER}+", regex.V1)
_INVERSE_REGULARIZATION = 10.0


def tfidf_predictions(train: Sequence[Any], validation: Sequence[Any], *, regression: bool) -> list[Any] | None:
    """Predictions for the texts of validation examples (one or two `texts`) by logistic or ridge regression of the
    `label` on TF-IDF features; a tuple of labels has a logistic regression for each label.

    The features of a pair are the features of both texts, their products and absolute differences, and the cosine. To
    bound the time, at most `MAX_TEXTS` random training examples are used, and the first `MAX_CHARACTERS` of each text.

    Returns:
        A label, tuple of labels or number per example; None if the texts have no words, or the labels of the subset are
        equal.
    """
    import scipy.sparse
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression, Ridge
    from threadpoolctl import threadpool_limits

    train = random.Random(0).sample(train, min(len(train), MAX_TEXTS))
    labels = [example.label for example in train]
    columns, new_columns = (
        [[text[:MAX_CHARACTERS] for text in column] for column in zip(*(example.texts for example in examples))]
        for examples in (train, validation)
    )
    vectorizer = TfidfVectorizer(
        tokenizer=_WORDS.findall, token_pattern=None, max_features=MAX_FEATURES, sublinear_tf=True, dtype=np.float32
    )
    try:
        vectorizer.fit([text for column in columns for text in column])
    except ValueError:  # no words
        return None
    if len(set(labels)) < 2:
        return None

    def features(columns: Sequence[Sequence[str]]) -> Any:
        blocks = [vectorizer.transform(column) for column in columns]
        if len(blocks) == 2:
            product = blocks[0].multiply(blocks[1])
            blocks += [product, abs(blocks[0] - blocks[1]), scipy.sparse.csr_matrix(product.sum(axis=1))]
        return scipy.sparse.hstack(blocks, format="csr")

    model = Ridge() if regression else LogisticRegression(C=_INVERSE_REGULARIZATION, max_iter=200)
    train_features, new_features = features(columns), features(new_columns)
    with warnings.catch_warnings(), threadpool_limits(1):  # threads only slow down products of short vectors
        warnings.simplefilter("ignore", ConvergenceWarning)
        if not isinstance(labels[0], tuple):
            return model.fit(train_features, labels).predict(new_features).tolist()
        predictions: list[tuple[str, ...]] = [()] * len(validation)
        for label in sorted({label for label_set in labels for label in label_set}):
            targets = [label in label_set for label_set in labels]
            is_predicted = (
                [True] * len(validation) if all(targets) else model.fit(train_features, targets).predict(new_features)
            )
            predictions = [(*row, label) if is_label else row for row, is_label in zip(predictions, is_predicted)]
    return predictions
