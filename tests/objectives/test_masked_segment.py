"""MASS: masked segments against reference loops, decoder inputs, languages, and attention masks of the model."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numbered_text import numbered_documents

from hf_ctxmodels import CtxBertTokenizer, CtxError, CtxMassConfig, CtxMassForConditionalGeneration, CtxMassTokenizer
from hf_ctxmodels.data import ExampleSet
from hf_ctxmodels.data.documents import TranslatedText
from hf_ctxmodels.data.seeding import generator
from hf_ctxmodels.objectives import MaskedSegment, MaskedTranslation

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "decoder_attention_heads": 4, "initializer_range": 0.2}
DOCUMENTS, _ = numbered_documents([[5, 9, 3], [30, 2, 2], [1], [40] * 3, [4] * 12])


def reference_columns(
    length: int, share: float, block: int | None, span: int | None, rng: np.random.Generator
) -> list[int]:
    """The released loops, token by token; for spans, span lengths and zeros for the other tokens are permuted."""
    columns, remaining = [], list(range(1, length))
    while block and remaining:
        tokens, remaining = remaining[:block], remaining[block:]
        size = int(share * len(tokens))
        start = int(rng.integers(tokens[0], tokens[-1] + 1 - size + 1))
        columns += range(start, start + size)
    if block:
        return columns
    size = min(round(share * length), length - 1)
    sample = rng.random()
    if span is None or span >= size:
        start = 1 if sample < 0.2 else length - size if sample < 0.4 else int(rng.integers(1, length - size + 1))
        return list(range(start, start + size))
    pieces = [min(span, size - start) for start in range(0, size, span)]
    others = [0] * (length - 1 - size)
    if sample < 0.2:
        order = [pieces[0], *rng.permutation([*pieces[1:], *others])]
    elif sample < 0.4:
        order = [*rng.permutation([*pieces[:-1], *others]), pieces[-1]]
    else:
        order = [*rng.permutation([*pieces, *others])]
    position = 1
    for piece in order:
        columns += range(position, position + int(piece))
        position += max(int(piece), 1)
    return columns


@given(
    segments=st.sampled_from([(None, None), (7, None), (64, None), (None, 1), (None, 2), (None, 5), (None, 10_000)]),
    side=st.sampled_from(["left", "right"]),
    options=st.fixed_dictionaries(
        {
            "share": st.sampled_from([0.15, 0.5, 0.9, 1.0]),
            "by_sentence": st.booleans(),
            "static": st.booleans(),
            "hidden": st.sampled_from(["masks", "segment"]),
            "seed": st.integers(0, 999),
        }
    ),
)
def test_masked_segments_and_decoder_inputs(
    tokenizer: CtxBertTokenizer, segments: tuple[int | None, int | None], side: str, options: dict[str, Any]
) -> None:
    """The decoder input of a target is the original token before it, at its position; the source keeps other tokens."""
    tokenizer = CtxBertTokenizer(vocab=tokenizer.get_vocab(), padding_side=side)
    block, span = segments
    objective = MaskedSegment(tokenizer, max_length=50, min_length=3, block=block, lambda_span=span, **options)
    rows = ExampleSet.build(objective.examples(DOCUMENTS))
    batch = objective.collate([rows[1, number] for number in range(len(rows))])
    words = []
    for number in range(len(rows)):
        original = rows[number]["input_ids"].tolist()
        rng = generator(objective.seed, 0 if objective.static else 1, number)
        expected = reference_columns(len(original), objective.share, block, span, rng)
        is_token = batch["attention_mask"][number] == 1
        source, visible = (batch[name][number][is_token].tolist() for name in ("input_ids", "cross_attention_mask"))
        masks = [position for position, token in enumerate(source) if token == tokenizer.mask_token_id]
        assert [position for position, value in enumerate(visible) if not value] == (
            masks if objective.hidden == "masks" else expected
        )
        assert (
            set(masks)
            <= {position for position in range(len(original)) if source[position] != original[position]}
            <= set(expected)
        )
        count = len(expected)
        for step, position in enumerate(expected):
            assert batch["labels"][number, step] == original[position]
            assert batch["decoder_input_ids"][number, step] == original[position - 1]
            assert batch["decoder_position_ids"][number, step] == position - 1
        assert (batch["labels"][number, count:] == -100).all()
        words += original[1:-1]
    text = [word for document in DOCUMENTS for sentence in document for word in sentence.split()]
    assert words == tokenizer.convert_tokens_to_ids(text)


@pytest.mark.parametrize("lambda_span", [None, 2])
def test_realized_rates(tokenizer: CtxBertTokenizer, lambda_span: int | None) -> None:
    """Half of the tokens are targets, and 80% of these are masked."""
    objective = MaskedSegment(tokenizer, max_length=64, seed=0, lambda_span=lambda_span)
    rows = ExampleSet.build(objective.examples(numbered_documents([[38] * 60])[0]))
    rates = objective.rates(objective.count_batch(objective.collate([rows[number] for number in range(60)])))
    assert rates["targets_per_token"] == 0.5
    assert rates["mask_token_share"] == pytest.approx(0.8, abs=0.03)


def test_masked_translation(subtests) -> None:
    """Encoder and decoder inputs of pairs in two languages, rates, and the loss of the model."""
    texts = [["<en> wa wb wc wd we", "<de> wf wg wh wi"], ["<de> wi wj", "<en> wa wb wc"]]
    pairs = [TranslatedText(pair) for pair in texts]
    tokenizer = CtxMassTokenizer.train([text for pair in pairs for text in pair] * 2, vocab_size=90)
    end = tokenizer.eos_token_id
    documents = [*pairs * 60, TranslatedText(["<de> wi", "<en> "]), TranslatedText(["<de> wi", "<en>" + 20 * " wa"])]
    corrupted = {"target_share": 0.5, "mask_share": 0.8, "random_share": 0.1}
    for options in ({}, corrupted, {"share": 0.3, "lambda_span": 1, **corrupted}):
        with subtests.test(**options):
            objective = MaskedTranslation(tokenizer, max_length=16, seed=1, **options)
            rows = ExampleSet.build(objective.examples(documents))
            assert len(rows) == 120
            assert objective.statistics["left_out"] == 2
            batch = objective.collate([rows[3, number] for number in range(120)])
            assert ("cross_attention_mask" in batch) == (objective.hidden != "nothing")
            num_changed, num_decoded, target_share = 0, 0, objective.target_share
            num_masked, num_inner = 0, 0
            for number, (source, target) in enumerate(pairs * 60):
                ids = tokenizer(source.split(" ", 1)[1]).input_ids
                labels = tokenizer(target.split(" ", 1)[1]).input_ids[1:]
                decoder_input = batch["decoder_input_ids"][number]
                assert batch["labels"][number].tolist() == labels + [-100] * (len(decoder_input) - len(labels))
                assert decoder_input[0] == end == objective.config_fields["decoder_start_token_id"]
                is_equal = (decoder_input[1 : len(labels)] == torch.tensor(labels[:-1])).tolist()
                num_changed, num_decoded = num_changed + is_equal.count(False), num_decoded + len(is_equal)
                assert is_equal.count(False) <= max(1, round(target_share * len(is_equal)))
                language_ids = [tokenizer.language_id(text[1:3]) for text in (source, target)]
                assert batch["langs"][number].unique().tolist() == language_ids[:1]
                assert batch["decoder_langs"][number].unique().tolist() == language_ids[1:]
                is_unchanged = batch["input_ids"][number, : len(ids)] == torch.tensor(ids)
                assert is_unchanged[0]
                if "lambda_span" in options:
                    assert is_unchanged.sum() >= len(ids) - round(objective.share * len(ids))
                else:
                    assert is_unchanged[-1], "the first and last token are not masked"
                    num_masked, num_inner = num_masked + int((~is_unchanged).sum()), num_inner + len(ids) - 2
            rates = objective.rates(objective.count_batch(batch))
            assert rates["decoder_change_share"] == pytest.approx(num_changed / num_decoded)
            budget = sum(round(target_share * length) or 1 for length in (4, 3)) if target_share else 0
            assert rates["decoder_mask_share"] == pytest.approx(0.8 * budget / 7, abs=0.04)
            if not options:
                assert num_masked / num_inner == pytest.approx(0.25, abs=0.04)
                assert num_masked == objective.count_batch(batch)["masks"], "only by mask tokens"
            assert (rates["decoder_change_share"] == 0) == (target_share == 0)
    torch.manual_seed(0)
    config = CtxMassConfig(vocab_size=len(tokenizer), **SIZES, **objective.config_fields)
    loss = CtxMassForConditionalGeneration(config)(**batch).loss
    assert torch.isfinite(loss)
    with pytest.raises(CtxError, match=r"(?s)no translation.*--translations FILE"):
        list(objective.examples([["<en> wa wb"]]))
    with pytest.raises(CtxError, match=r"(?s)no language tag.*language=LANGUAGE"):
        list(objective.examples([TranslatedText(["wa wb", "<en> wa"])]))


def test_languages_of_rows_and_model() -> None:
    """Each row has one language; rows of several sentences end where the language changes."""
    texts = ["<de> wa wb wc wd", "<en> we wf wg wh", "<en> wi wj wa wc"]
    tokenizer = CtxMassTokenizer.train(texts * 2, vocab_size=90)
    objective = MaskedSegment(tokenizer, max_length=64, seed=0, by_sentence=False)
    rows = ExampleSet.build(objective.examples([texts]))
    batch = objective.collate([rows[number] for number in range(len(rows))])
    assert [int(row["language"]) for row in (rows[number] for number in range(len(rows)))] == [0, 1]
    assert batch["langs"].unique(dim=1).tolist() == batch["decoder_langs"].unique(dim=1).tolist() == [[0], [1]]
    fields = objective.config_fields
    assert fields == {"n_langs": 2, "decoder_start_token_id": tokenizer.eos_token_id, "lang2id": {"de": 0, "en": 1}}
    torch.manual_seed(0)
    model = CtxMassForConditionalGeneration(CtxMassConfig(vocab_size=len(tokenizer), **SIZES, **fields)).eval()
    loss = model(**batch).loss
    other_loss = model(**batch | {"decoder_langs": 1 - batch["decoder_langs"]}).loss
    assert loss != other_loss
    loss.backward()
    for stack in (model.mass.encoder, model.mass.decoder):
        assert stack.language_embeddings.weight.grad.any()
    with pytest.raises(CtxError, match=r"but langs is missing(.|\n)*0 de, 1 en"):
        model(batch["input_ids"], labels=batch["labels"])
    with pytest.raises(CtxError, match=r"but decoder_langs is missing(.|\n)*pass decoder_langs"):
        model(batch["input_ids"], langs=batch["langs"], labels=batch["labels"])
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "langs")}
    language, options = batch["langs"][:, :1], {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    generated = model.generate(**inputs, decoder_langs=language, **options)
    inputs |= {"decoder_input_ids": generated[:, :-1], "decoder_langs": language.expand(-1, generated.shape[1] - 1)}
    assert torch.equal(model(**inputs).logits.argmax(-1), generated[:, 1:])


def test_decoder_ignores_masked_encoder_states(tokenizer: CtxBertTokenizer) -> None:
    """Encoder states at masked positions do not affect the logits."""
    objective = MaskedSegment(tokenizer, max_length=50, seed=0)
    rows = ExampleSet.build(objective.examples(DOCUMENTS))
    batch = objective.collate([rows[number] for number in (1, 3)])
    torch.manual_seed(0)
    config = CtxMassConfig(vocab_size=len(tokenizer), pad_token_id=0, n_langs=1, **SIZES)
    model = CtxMassForConditionalGeneration(config).eval()
    labels = batch.pop("labels")
    encoded = model.get_encoder()(batch["input_ids"], attention_mask=batch["attention_mask"])
    expected = model(**batch, encoder_outputs=encoded).logits
    hidden = batch["cross_attention_mask"] == 0
    encoded.last_hidden_state = encoded.last_hidden_state.masked_fill(hidden[..., None], 7.0)
    assert torch.equal(model(**batch, encoder_outputs=encoded).logits, expected)
    del batch["cross_attention_mask"]
    assert not torch.allclose(model(**batch, encoder_outputs=encoded).logits, expected)
    loss = model(**batch, labels=labels).loss
    shifted = batch | {"decoder_position_ids": batch["decoder_position_ids"] + 1}
    assert loss != model(**shifted, labels=labels).loss
