"""MASS's masks by plain loops, what the decoder is given of them, and that the model cannot see what it writes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_text import numbered_documents

from hf_ctxmodels import CtxBertTokenizer, CtxError, CtxMassConfig, CtxMassForConditionalGeneration, CtxMassTokenizer
from hf_ctxmodels.data import ExampleSet
from hf_ctxmodels.data.documents import TranslatedText
from hf_ctxmodels.objectives import DataCollatorForMaskedSegment, MaskedSegment, MaskedTranslation

DOCUMENTS, _ = numbered_documents([[5, 9, 3], [30, 2, 2], [1], [40] * 3, [4] * 12])


def segments_by_loops(length: int, share: float, block: int | None, rng: np.random.Generator) -> list[int]:
    """Columns token by token, by the fact that a block, behind the row's first, has one run of its tokens."""
    if block is None:
        size = round(share * length)
        if size > length - 1:
            size = length - 1
        draw = rng.random()
        if draw < 0.2:
            start = 1
        elif draw < 0.4:
            start = length - size
        else:
            start = int(rng.integers(1, length - size + 1))
        return [start + number for number in range(size)]
    columns, behind = [], list(range(1, length))
    while behind:
        tokens, behind = behind[:block], behind[block:]
        size = int(share * len(tokens))
        start = int(rng.integers(tokens[0], tokens[-1] + 1 - size + 1))
        columns += [start + number for number in range(size)]
    return columns


@settings(max_examples=40)
@given(
    share=st.sampled_from([0.15, 0.5, 1.0]),
    block=st.sampled_from([None, 7, 64]),
    side=st.sampled_from(["left", "right"]),
    by_sentence=st.booleans(),
    static=st.booleans(),
    hidden=st.sampled_from(["masks", "segment"]),
)
def test_segments_and_what_the_decoder_is_given(
    tokenizer: CtxBertTokenizer,
    share: float,
    block: int | None,
    side: str,
    by_sentence: bool,
    static: bool,
    hidden: str,
) -> None:
    """Each target's input is the true token before it, at its position; the source keeps all that is no segment."""
    tokenizer.padding_side = side
    options = {"share": share, "block": block, "by_sentence": by_sentence, "static": static, "hidden": hidden}
    options["min_length"] = 3
    objective = MaskedSegment(tokenizer, max_length=50, seed=2, **options)
    rows = ExampleSet.build(objective.examples(DOCUMENTS))
    batch = objective.collate([rows[1, number] for number in range(len(rows))])
    words = []
    for number in range(len(rows)):
        clean = rows[number]["input_ids"].tolist()
        expected = segments_by_loops(len(clean), share, block, _generator(objective, number, static))
        here = batch["attention_mask"][number] == 1
        source, seen = (batch[name][number][here].tolist() for name in ("input_ids", "cross_attention_mask"))
        masks = [place for place, token in enumerate(source) if token == tokenizer.mask_token_id]
        assert [place for place, value in enumerate(seen) if not value] == (masks if hidden == "masks" else expected)
        assert set(masks) <= {place for place in range(len(clean)) if source[place] != clean[place]} <= set(expected)
        count = len(expected)
        for step, place in enumerate(expected):
            assert batch["labels"][number, step] == clean[place]
            assert batch["decoder_input_ids"][number, step] == clean[place - 1]
            assert batch["decoder_position_ids"][number, step] == place - 1
        assert (batch["labels"][number, count:] == -100).all()
        words += clean[1:-1]
    text = [word for document in DOCUMENTS for sentence in document for word in sentence.split()]
    assert words == tokenizer.convert_tokens_to_ids(text)
    tokenizer.padding_side = "right"


def _generator(objective: MaskedSegment, number: int, static: bool) -> np.random.Generator:
    from hf_ctxmodels.data.seeding import generator

    return generator(objective.seed, 0 if static else 1, number)


def test_realised_rates(tokenizer: CtxBertTokenizer) -> None:
    """Half of the tokens, 80% of them masked; of the places a fifth and more is the start, and the end."""
    objective = MaskedSegment(tokenizer, max_length=64, seed=0)
    rows = ExampleSet.build(objective.examples(numbered_documents([[38] * 60])[0]))
    batch = objective.collate([rows[number] for number in range(60)])
    rates = objective.rates(objective.count_batch(batch))
    assert rates["targets_per_token"] == 0.5
    assert rates["mask_token_share"] == pytest.approx(0.8, abs=0.03)
    firsts = [int(ids) for ids in batch["decoder_position_ids"][:, 0]]
    draws = [objective.segments(40, np.random.default_rng(seed))[0] for seed in range(4000)]
    assert np.mean(np.array(draws) == 1) == pytest.approx(0.2 + 0.6 / 20, abs=0.02)
    assert np.mean(np.array(draws) == 20) == pytest.approx(0.2 + 0.6 / 20, abs=0.02)
    assert min(firsts) == 0


def pieces_by_loops(length: int, share: float, span: int, rng: np.random.Generator) -> list[int]:
    """Columns, from a list of piece lengths and zeros for kept tokens, which is unfolded token by token."""
    size, pieces = min(round(share * length), length - 1), []
    kept = [0] * (length - 1 - size)
    while size > 0:
        pieces.append(min(span, size))
        size -= span
    draw = rng.random()
    if draw < 0.2:
        order = [pieces[0], *rng.permutation([*pieces[1:], *kept])]
    elif draw < 0.4:
        order = [*rng.permutation([*pieces[:-1], *kept]), pieces[-1]]
    else:
        order = [*rng.permutation([*pieces, *kept])]
    columns, place = [], 1
    for piece in order:
        columns += range(place, place + int(piece))
        place += max(int(piece), 1)
    assert place == length
    return columns


def test_a_segment_in_pieces(tokenizer: CtxBertTokenizer) -> None:
    """The released loop; shares of tokens, of pieces at both ends and of single columns; one piece is a segment."""
    for share, span, length in ((0.5, 4, 41), (0.5, 1, 12), (1.0, 3, 9), (0.3, 2, 20), (0.9, 5, 7)):
        collator = DataCollatorForMaskedSegment(tokenizer, share=share, lambda_span=span)
        found = []
        for seed in range(300):
            places = collator.segments(length, np.random.default_rng(seed)).tolist()
            assert places == pieces_by_loops(length, share, span, np.random.default_rng(seed))
            found.append(np.isin(np.arange(length), places))
        chosen = np.array(found)
        assert (chosen.sum(1) == min(round(share * length), length - 1)).all()
        assert not chosen[:, 0].any(), "the first token is never masked"
    collator, rng = DataCollatorForMaskedSegment(tokenizer, lambda_span=2), np.random.default_rng(0)
    masks = np.array([np.bincount(collator.segments(40, rng), minlength=40) for _ in range(4000)])
    rate = 9 / 29  # of what is shuffled, 10 pieces of 2 and 19 tokens, a piece is at the begin in 10 of 29
    assert masks[:, 1].mean() == pytest.approx(0.2 + 0.2 * rate + 0.6 * 10 / 29, abs=0.025)
    assert masks[:, 39].mean() == pytest.approx(0.2 + 0.2 * rate + 0.6 * 10 / 29, abs=0.025)
    whole, one = (DataCollatorForMaskedSegment(tokenizer, lambda_span=span) for span in (None, 10000))
    for seed in range(50):
        assert np.array_equal(*(each.segments(30, np.random.default_rng(seed)) for each in (whole, one)))
    objective = MaskedSegment(tokenizer, max_length=50, seed=0, lambda_span=2)
    rows = ExampleSet.build(objective.examples(DOCUMENTS))
    batch = objective.collate([rows[number] for number in range(len(rows))])
    for number in range(len(rows)):
        clean = rows[number]["input_ids"]
        steps = batch["labels"][number] != -100
        places = batch["decoder_position_ids"][number][steps] + 1
        assert batch["labels"][number][steps].tolist() == clean[places].tolist()
        assert batch["decoder_input_ids"][number][steps].tolist() == clean[places - 1].tolist()
    assert objective.rates(objective.count_batch(batch))["targets_per_token"] == pytest.approx(0.5, abs=0.03)


def test_masked_translation(subtests) -> None:
    """What the encoder and the decoder are given of pairs in two languages, the rates, and that the model takes it."""
    pairs = [
        TranslatedText(["<en> wa wb wc wd we", "<de> wf wg wh wi"]),
        TranslatedText(["<de> wi wj", "<en> wa wb wc"]),
    ]
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
            again = objective.collate([rows[3, number] for number in (1, 0)])
            assert ("cross_attention_mask" in batch) == (objective.hidden != "nothing")
            changed, given, expected = 0, 0, objective.target_share
            masked, inner = 0, 0
            for number, (source, target) in enumerate(pairs * 60):
                ids = tokenizer(source.split(" ", 1)[1]).input_ids
                labels = tokenizer(target.split(" ", 1)[1]).input_ids[1:]
                read = batch["decoder_input_ids"][number]
                assert batch["labels"][number].tolist() == labels + [-100] * (len(read) - len(labels))
                assert read[0] == end == objective.config_fields["decoder_start_token_id"]
                same = (read[1 : len(labels)] == torch.tensor(labels[:-1])).tolist()
                changed, given = changed + same.count(False), given + len(same)
                assert same.count(False) <= max(1, round(expected * len(same)))
                numbers = [tokenizer.language_id(text[1:3]) for text in (source, target)]
                assert batch["langs"][number].unique().tolist() == numbers[:1]
                assert batch["decoder_langs"][number].unique().tolist() == numbers[1:]
                kept = batch["input_ids"][number, : len(ids)] == torch.tensor(ids)
                assert kept[0]
                if "lambda_span" in options:
                    assert kept.sum() >= len(ids) - round(objective.share * len(ids))
                else:
                    assert kept[-1], "neither end is masked"
                    masked, inner = masked + int((~kept).sum()), inner + len(ids) - 2
            assert torch.equal(again["input_ids"][1][:7], batch["input_ids"][0][:7]), "a row's masks are its own"
            rates = objective.rates(objective.count_batch(batch))
            assert rates["decoder_change_share"] == pytest.approx(changed / given)
            budgets = [round(expected * length) or 1 for length in (4, 3)] if expected else [0, 0]
            assert rates["decoder_mask_share"] == pytest.approx(0.8 * sum(budgets) / 7, abs=0.04)
            if not options:
                assert masked / inner == pytest.approx(0.25, abs=0.04)
                assert masked == objective.count_batch(batch)["masks"], "by mask tokens alone"
            assert (rates["decoder_change_share"] == 0) == (expected == 0)
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_attention_heads": 4, "decoder_attention_heads": 4, "initializer_range": 0.2}
    config = CtxMassConfig(vocab_size=len(tokenizer), **size, **objective.config_fields)
    loss = CtxMassForConditionalGeneration(config)(**batch).loss
    assert torch.isfinite(loss)
    with pytest.raises(CtxError, match=r"(?s)no translation.*--translations FILE"):
        list(objective.examples([["<en> wa wb"]]))
    with pytest.raises(CtxError, match=r"(?s)no language tag.*language=LANGUAGE"):
        list(objective.examples([TranslatedText(["wa wb", "<en> wa"])]))


def test_languages() -> None:
    """Each row has one, of its text and of its segment; rows of several sentences end where the language changes."""
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
    size = {"hidden_size": 32, "num_attention_heads": 4, "decoder_attention_heads": 4, "initializer_range": 0.2}
    model = CtxMassForConditionalGeneration(CtxMassConfig(vocab_size=len(tokenizer), **size, **fields)).eval()
    loss = model(**batch).loss
    other = model(**batch | {"decoder_langs": 1 - batch["decoder_langs"]}).loss
    assert loss != other
    loss.backward()
    for stack in (model.mass.encoder, model.mass.decoder):
        assert stack.language_embeddings.weight.grad.any()
    with pytest.raises(CtxError, match=r"but langs is missing(.|\n)*0 de, 1 en"):
        model(batch["input_ids"], labels=batch["labels"])
    with pytest.raises(CtxError, match=r"but decoder_langs is missing(.|\n)*pass decoder_langs"):
        model(batch["input_ids"], langs=batch["langs"], labels=batch["labels"])
    with pytest.raises(CtxError, match="does not accept the argument target_languages"):
        model(**batch, target_languages=batch["langs"][:, 0])
    written = model.generate(
        batch["input_ids"],
        attention_mask=batch["attention_mask"],
        langs=batch["langs"],
        decoder_langs=batch["langs"][:, :1],
        max_new_tokens=4,
        do_sample=False,
        eos_token_id=None,
    )
    ids, known = written[:, :-1], batch["langs"][:, :1].expand(-1, written.shape[1] - 1)
    read = {name: batch[name] for name in ("input_ids", "attention_mask", "langs")}
    logits = model(**read, decoder_input_ids=ids, decoder_langs=known).logits
    assert torch.equal(logits.argmax(-1), written[:, 1:])


def test_the_decoder_sees_no_masked_state_and_no_later_token(tokenizer: CtxBertTokenizer) -> None:
    """What a masked column holds reaches the decoder through other states only."""
    objective = MaskedSegment(tokenizer, max_length=50, seed=0)
    rows = ExampleSet.build(objective.examples(DOCUMENTS))
    batch = objective.collate([rows[number] for number in (1, 3)])
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_attention_heads": 4, "decoder_attention_heads": 4, "initializer_range": 0.2}
    config = CtxMassConfig(vocab_size=len(tokenizer), pad_token_id=0, n_langs=1, **size)
    model = CtxMassForConditionalGeneration(config).eval()
    labels = batch.pop("labels")
    encoded = model.get_encoder()(batch["input_ids"], attention_mask=batch["attention_mask"])
    expected = model(**batch, encoder_outputs=encoded).logits
    hidden = batch["cross_attention_mask"] == 0
    noisy = encoded.last_hidden_state.masked_fill(hidden[..., None], 7.0)
    encoded.last_hidden_state = noisy
    assert torch.equal(model(**batch, encoder_outputs=encoded).logits, expected)
    del batch["cross_attention_mask"]
    assert not torch.allclose(model(**batch, encoder_outputs=encoded).logits, expected)
    loss = model(**batch, labels=labels).loss
    moved = batch | {"decoder_position_ids": batch["decoder_position_ids"] + 1}
    assert loss != model(**moved, labels=labels).loss
