"""Texts of numbered words, and checks of examples and batches."""

import numpy as np
import torch

NUM_WORDS = 3000


def word(number):
    """A word of letters only, so that it is one token: 0 -> "wa", 12 -> "wbc"."""
    return "w" + "".join(chr(ord("a") + int(digit)) for digit in str(number))


def numbered_documents(shape):
    """Documents with sentences of the given lengths, and word number -> document; word n is the n-th of the text."""
    number, documents, document_of = 0, [], {}
    for index, lengths in enumerate(shape):
        sentences = []
        for length in lengths:
            sentences.append(" ".join(word(number + offset) for offset in range(length)))
            document_of.update({number + offset: index for offset in range(length)})
            number += length
        documents.append(sentences)
    return documents, document_of


def make_examples(objective_class, tokenizer, shape, passes=1, max_length=24, seed=0, **options):
    """The objective, word number -> document, and the examples of `passes` passes over numbered documents."""
    documents, document_of = numbered_documents(shape)
    objective = objective_class(tokenizer, max_length=max_length, seed=seed, **options)
    return objective, document_of, [row for index in range(passes) for row in objective.examples(documents, index)]


def split_segments(example):
    """Word numbers of each segment of [CLS] A [SEP] or [CLS] A [SEP] B [SEP]; checks special tokens and token types."""
    ids, types = example["input_ids"], example.get("token_type_ids")
    ends = np.flatnonzero(ids == 3)
    assert (ids[0], ends[-1]) == (2, len(ids) - 1)
    assert types is None or types.tolist() == [0] * (ends[0] + 1) + [1] * (len(ids) - ends[0] - 1)
    return [segment[1:] - 5 for segment in np.split(ids, ends)[:-1]]


def assert_contiguous(segment_list, document_of):
    """Check that each segment has consecutive words of one document."""
    for segment in segment_list:
        assert len(segment) >= 1
        assert (np.diff(segment) == 1).all()
        assert len({document_of[number] for number in segment.tolist()}) == 1


def with_index(rows, epoch=0):
    """Examples with index and epoch, as an `ExampleSet` returns them."""
    return [{**row, "example_index": index, "epoch": epoch} for index, row in enumerate(rows)]


def check_independent_rows(objective, features):
    """Check that each row of a batch equals its example collated alone; returns the batch."""
    full_batch = objective.collate(features)
    for index in reversed(range(len(features))):
        single = objective.collate(features[index : index + 1])
        for column, values in single.items():
            if values.dim() == 1:
                assert values[0] == full_batch[column][index], column
                continue
            if column == "target_positions":  # relative to the end of the row, since left padding shifts them
                values, batch_values = (batch["input_ids"].shape[1] - batch[column] for batch in (single, full_batch))
                assert values[0].tolist() == batch_values[index, : values.shape[1]].tolist()
                continue
            is_left_padded = (
                full_batch[column].shape == full_batch["input_ids"].shape and objective.tokenizer.padding_side == "left"
            )
            width = values.shape[1]
            expected = full_batch[column][index, -width:] if is_left_padded else full_batch[column][index, :width]
            assert torch.equal(values[0], expected), column
    return full_batch
