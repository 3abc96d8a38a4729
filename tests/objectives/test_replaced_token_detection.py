"""Rows and batches of replaced token detection: segments, original and masked tokens, and sampling seeds."""

import pytest
import torch
from numbered_text import numbered_documents, with_index

from hf_ctxmodels.objectives import DataCollatorForReplacedTokenDetection, ReplacedTokenDetection
from hf_ctxmodels.objectives.replaced_token_detection import IGNORE_INDEX


def rows_of(tokenizer, shape, max_length=32, **options):
    documents, _ = numbered_documents(shape)
    objective = ReplacedTokenDetection(tokenizer, max_length=max_length, seed=4, **options)
    return objective, with_index(objective.examples(documents))


def test_split_at_sentence_nearest_to_middle(tokenizer):
    _, (row,) = rows_of(tokenizer, [[3, 5, 6, 2]], single_segment_share=0.0)
    ids, types = row["input_ids"], row["token_type_ids"]
    assert ids[0] == tokenizer.cls_token_id
    separators = (ids == tokenizer.sep_token_id).nonzero()[0].tolist()
    assert separators == [9, 18]  # after 3 + 5 words, and after 3 + 5 + 6 + 2
    assert types.tolist() == [0] * 10 + [1] * 9
    assert len(ids) == len(types) == 16 + 3


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0.0), (1.0, 1.0), (0.3, 0.3)])
def test_share_of_single_segments(tokenizer, share, expected):
    _, rows = rows_of(tokenizer, [[4, 4]] * 400, single_segment_share=share)
    single = sum(not row["token_type_ids"].any() for row in rows) / len(rows)
    assert single == pytest.approx(expected, abs=0.08 if 0 < share < 1 else 0)


def test_rows_contain_all_tokens(tokenizer):
    _, rows = rows_of(tokenizer, [[70], [9, 20, 12, 3]], max_length=30)
    words = [id_ for row in rows for id_ in row["input_ids"].tolist() if id_ not in tokenizer.all_special_ids]
    assert words == list(range(5, 5 + 114))
    assert all(len(row["input_ids"]) <= 30 for row in rows)
    assert not rows[0]["token_type_ids"].any()


def test_whole_words_and_packing(tokenizer):
    objective, rows = rows_of(tokenizer, [[4, 4], [3, 6]], max_length=40, whole_word=True, packing=True)
    (row,) = rows
    assert {len(row[name]) for name in ("input_ids", "token_type_ids", "word_ids", "sequence_ids")} == {8 + 9 + 6}
    batch = objective.collate(rows)
    assert batch["sequence_ids"].max() == 2


def test_batch_columns(tokenizer):
    objective, rows = rows_of(tokenizer, [[5, 7], [2, 3, 4], [12, 9]])
    batch = objective.collate(rows)
    is_token = batch["attention_mask"].bool()
    for number, row in enumerate(rows):
        assert batch["token_labels"][number][is_token[number]].tolist() == row["input_ids"].tolist()
    assert (batch["token_labels"][~is_token] == IGNORE_INDEX).all()
    is_masked = batch["labels"] != IGNORE_INDEX
    assert torch.equal(batch["labels"][is_masked], batch["token_labels"][is_masked])
    assert batch["sampling_seed"].shape == (3,)
    assert batch["sampling_seed"].dtype is torch.int64


def test_masking_rates(tokenizer):
    """85% [MASK], 15% unchanged, none random; 100% by option."""
    for share in (0.85, 1.0):
        options = {} if share == 0.85 else {"mask_share": 1.0}
        objective, rows = rows_of(tokenizer, [[40, 40]] * 200, max_length=128, **options)
        rates = objective.rates(objective.count_batch(objective.collate(rows)))
        assert rates["selected_share"] == pytest.approx(0.15, abs=0.005)
        assert rates["mask_token_share"] == pytest.approx(share, abs=0.02)
        assert rates["random_token_share"] == 0


def test_sampling_seeds_differ_by_example_epoch_and_seed(tokenizer):
    objective, rows = rows_of(tokenizer, [[5, 7], [2, 3, 4], [12, 9]])
    seeds, next_epoch = (objective.collate(with_index(rows, epoch))["sampling_seed"] for epoch in (0, 1))
    other_seeds = DataCollatorForReplacedTokenDetection(tokenizer, seed=5)(rows)["sampling_seed"]
    assert len({*seeds.tolist(), *next_epoch.tolist(), *other_seeds.tolist()}) == 9
