"""BART's denoising: corruption against reference loops over tokens, unchanged tokens, and targets."""

import math
from collections import Counter
from itertools import chain, pairwise, permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_text import numbered_documents

from hf_ctxmodels import CtxBartTokenizer, CtxBertTokenizer
from hf_ctxmodels.data import ExampleSet
from hf_ctxmodels.objectives import DataCollatorForDenoising, Denoising

MASK, RANDOM = 9000, 9001
DOCUMENTS, _ = numbered_documents([[5, 9, 3], [30, 2, 2], [1], [40] * 3, [4] * 12])
all_options = st.fixed_dictionaries(
    {
        "mask": st.sampled_from([0.0, 0.15, 0.3, 1.0]),
        "mask_random": st.sampled_from([0.0, 0.1, 1.0]),
        "mask_length": st.sampled_from(["span-poisson", "word", "subword"]),
        "poisson_lambda": st.sampled_from([0.4, 3.0, 3.5]),
        "replace_length": st.sampled_from([-1, 0, 1]),
        "permute_sentences": st.sampled_from([0.0, 0.5, 1.0]),
        "insert": st.sampled_from([0.0, 0.1, 0.5]),
        "rotate": st.sampled_from([0.0, 0.5, 1.0]),
    }
)
Text = tuple[np.ndarray, np.ndarray, np.ndarray]


def random_text(seed: int) -> Text:
    """Ids, word starts and sentence bounds of up to forty tokens."""
    rng = np.random.default_rng(seed)
    length = int(rng.integers(1, 40))
    starts = rng.random(length) < 0.6
    starts[0] = True
    bounds = [0, *(position for position in range(1, length) if starts[position] and rng.random() < 0.2), length]
    return np.arange(100, 100 + length), starts, np.array(bounds)


def reference_noise(rule: DataCollatorForDenoising, text: Text, rng: np.random.Generator) -> list[int]:
    """The released functions token by token, which sample in the order of the collator; there is only one random token.
    A text has two special tokens."""
    ids, starts, bounds = text
    tokens = [(int(token), bool(start)) for token, start in zip(ids, starts)]
    if rule.permute_sentences:
        sentences = [tokens[first:last] for first, last in pairwise(bounds)]
        selected = rng.permutation(len(sentences))[: math.ceil(len(sentences) * rule.permute_sentences)].tolist()
        order = list(range(len(sentences)))
        for position, index in zip(selected, rng.permutation(len(selected)).tolist()):
            order[position] = selected[index]
        tokens = [token for number in order for token in sentences[number]]
    noised = reference_mask(rule, tokens, rng) if rule.mask else [token for token, _ in tokens]
    if rule.insert:
        noised = insert_masks(rule, noised, math.ceil(round((len(noised) + 2) * rule.insert, 6)), rng)
    if rule.rotate and rng.random() < rule.rotate and noised:
        offset = int(rng.integers(len(noised)))
        noised = noised[offset:] + noised[:offset]
    return noised


def reference_mask(
    rule: DataCollatorForDenoising, tokens: list[tuple[int, bool]], rng: np.random.Generator
) -> list[int]:
    starts = [position for position, (_, start) in enumerate(tokens) if start]
    budget = math.ceil(round(len(starts) * rule.mask, 6))
    lengths = [1] * budget
    if rule.mask_length == "span-poisson":
        weights = []
        for length in range(128):
            weights.append(math.exp(-rule.poisson_lambda) * rule.poisson_lambda**length / math.factorial(length))
            if weights[-1] < 1e-7:
                break
        weights = np.array(weights) / sum(weights)
        lengths_sampled = []
        while sum(lengths_sampled) < budget:
            lengths_sampled += rng.choice(len(weights), size=budget, p=weights).tolist()
        lengths = []
        while sum(lengths) < budget:
            lengths.append(min(lengths_sampled[len(lengths)], budget - sum(lengths)))
    num_insertions, lengths = lengths.count(0), [length for length in lengths if length]
    words = rng.permutation(len(starts))[: len(lengths)].tolist()
    randoms = (rng.random(len(words)) < rule.mask_random).tolist()
    spans = [[starts[word], length, is_random] for word, length, is_random in zip(words, lengths, randoms)]
    ids: list[int | None] = [token for token, _ in tokens]
    if rule.replace_length:
        for position, _, is_random in spans:
            ids[position] = RANDOM if is_random else MASK
    dropped = {position for position, *_ in spans} if rule.replace_length == 0 else set()
    while spans:  # extend all spans by one token
        extended = []
        for position, length, is_random in spans:
            position += 1
            if position == len(tokens):
                continue
            length -= tokens[position][1]
            if length > 0:
                extended.append([position, length, is_random])
                if rule.replace_length == -1:
                    ids[position] = RANDOM if is_random else MASK
                else:
                    dropped.add(position)
        spans = extended
    remaining_tokens = [token for position, token in enumerate(ids) if position not in dropped]
    return insert_masks(rule, remaining_tokens, num_insertions, rng)


def insert_masks(rule: DataCollatorForDenoising, ids: list[int], count: int, rng: np.random.Generator) -> list[int]:
    if not count:
        return ids
    positions = rng.permutation(len(ids) + count)[:count].tolist()
    random_positions = positions[: math.ceil(round(count * rule.mask_random, 6))]
    remaining_ids = iter(ids)
    inserted = {position: RANDOM if position in random_positions else MASK for position in positions}
    return [inserted[position] if position in inserted else next(remaining_ids) for position in range(len(ids) + count)]


@settings(max_examples=100)
@given(options=all_options, seed=st.integers(0, 10_000))
def test_noise_matches_reference_loops(tokenizer: CtxBertTokenizer, options: dict[str, Any], seed: int) -> None:
    collator = DataCollatorForDenoising(tokenizer, **options)
    collator.mask_id, collator.replacements = MASK, np.array([RANDOM])
    ids, starts, bounds = random_text(seed)
    text = ids, starts | (collator.mask_length == "subword"), bounds
    assert collator.noise(*text, np.random.default_rng(seed)).tolist() == reference_noise(
        collator, text, np.random.default_rng(seed)
    )


@pytest.mark.parametrize("full_stops", [False, True])
def test_sentence_permutation(tokenizer: CtxBertTokenizer, full_stops: bool) -> None:
    """Sentences are those of the text, or end at full stops: at the first of several, and at the end of the row."""
    text = DOCUMENTS[0]
    if full_stops:
        tokenizer, text = CtxBartTokenizer.train(["w x y z . a b c"], vocab_size=280), ["w x. y z... a b. c"]
    objective = Denoising(tokenizer, max_length=64, seed=0, mask=0.0, full_stops=full_stops)
    (row,) = objective.examples([text])
    first_id, *inner, last_id = ids = row["input_ids"].tolist()
    sentences = [tokenizer(sentence, add_special_tokens=False).input_ids for sentence in text]
    if full_stops:  # "..." may be one token or three; tokens after the first full stop belong to the next sentence
        stop = tokenizer.convert_tokens_to_ids(".")
        ends = [position + 1 for position, token in enumerate(inner) if token == stop and inner[position - 1] != stop]
        sentences = [inner[first:last] for first, last in zip([0, *ends], [*ends, len(inner)]) if last > first]
        assert len(sentences) >= 3
    assert [*chain(*sentences)] == inner
    orders = {(first_id, *chain(*order), last_id) for order in permutations(sentences)}
    sources = set()
    for epoch in range(60):
        batch = objective.collate([{**row, "example_index": 0, "epoch": epoch}])
        assert batch["labels"][0].tolist() == ids
        sources.add(tuple(batch["input_ids"][0].tolist()))
    assert sources <= orders
    assert len(sources) == len(orders) or len(sources) > 20


def test_byte_level_words_are_split_at_spaces() -> None:
    """Punctuation and suffixes belong to the word before them; a sentence starts a word, also without a space."""
    text = [["the mat, didn't it?", "no. (none)"]]
    tokenizer = CtxBartTokenizer.train(text[0], vocab_size=280)
    objective = Denoising(tokenizer, max_length=64, seed=0, mask=1.0, mask_random=0.0, mask_length="word")
    (row,) = objective.examples(text)
    masks = [tokenizer.mask_token_id] * 6  # the / mat, / didn't / it? / no. / (none)
    options = {"mask": 1.0, "mask_random": 0.0, "mask_length": "word"}
    collate = DataCollatorForDenoising(tokenizer, permute_sentences=0, **options)
    for feature in (row, {name: value for name, value in row.items() if name != "sentence_starts"}):
        batch = collate([{**feature, "example_index": 0, "epoch": 0}])
        count = 6 if feature is row else 5  # "no." then belongs to "it?"
        assert batch["input_ids"][0, 1:-1].tolist() == masks[:count]


@settings(max_examples=30)
@given(options=all_options, side=st.sampled_from(["left", "right"]))
def test_rows_and_targets(tokenizer: CtxBertTokenizer, options: dict[str, Any], side: str) -> None:
    """Targets are the original text; the source has special tokens only at its ends."""
    tokenizer = CtxBertTokenizer(vocab=tokenizer.get_vocab(), padding_side=side)
    objective = Denoising(tokenizer, max_length=50, seed=3, **options)
    rows = ExampleSet.build(objective.examples(DOCUMENTS))
    batch = objective.collate([rows[1, number] for number in range(len(rows))])
    special = set(tokenizer.all_special_ids) - {tokenizer.mask_token_id}
    words = []
    for number, (ids, mask, labels) in enumerate(zip(*(batch[n] for n in ("input_ids", "attention_mask", "labels")))):
        original = rows[number]["input_ids"].tolist()
        assert labels[labels != -100].tolist() == original
        assert (labels[len(original) :] == -100).all()
        source = ids[mask == 1].tolist()
        assert (source[0], source[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
        assert not special & set(source[1:-1])
        words += original[1:-1]
    text = [word for document in DOCUMENTS for sentence in document for word in sentence.split()]
    assert words == tokenizer.convert_tokens_to_ids(text)


def test_realized_rates(tokenizer: CtxBertTokenizer) -> None:
    """Text infilling of the paper: 30% of the words, in spans replaced by one token each."""
    objective = Denoising(tokenizer, max_length=400, seed=0, poisson_lambda=3.0, mask_random=0.0)
    documents, _ = numbered_documents([[20] * 19] * 7)
    rows = ExampleSet.build(objective.examples(documents))
    total: Counter[str] = Counter()
    for epoch in range(20):
        total.update(objective.count_batch(objective.collate([rows[epoch, number] for number in range(len(rows))])))
    rates = objective.rates(total)
    assert rates["targets_per_token"] * rates["source_length"] == pytest.approx(1)
    # 114 of 380 words in about 38 spans; a fifth of the spans starts within another
    assert rates["source_length"] == pytest.approx(1 - 0.3 * (1 - 1 / 3), abs=0.03)
    assert rates["mask_token_share"] == pytest.approx(0.08 / rates["source_length"], abs=0.01)


def test_features_without_word_and_sentence_columns(tokenizer: CtxBertTokenizer) -> None:
    row = {"input_ids": tokenizer("wa wb").input_ids, "example_index": 0, "epoch": 0}
    batch = DataCollatorForDenoising(tokenizer, mask_length="subword", permute_sentences=0.0)([row])
    assert batch["labels"][0].tolist() == row["input_ids"]
