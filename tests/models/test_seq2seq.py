"""Transformer encoder-decoders: caches, all modes of `generate`, the decoder's input, the last end token's state."""

from pathlib import Path

import pytest
import torch
from benchmarks.measure import peak_bytes
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache
from zoo import CASES, PATHS, Case, assert_close, assert_same_gradients, gradients, make_batch, make_targets

from hf_ctxmodels import CtxBartConfig, CtxBartModel, CtxError
from hf_ctxmodels.architectures.encoder_decoder_heads import TransformerForConditionalGeneration
from hf_ctxmodels.core.generation_cache import BeamSearchCache
from hf_ctxmodels.heads.seq2seq import Seq2SeqHead
from hf_ctxmodels.layers.attention.layouts import PackedLayout

ALL_WRITERS = [case for case in CASES if issubclass(case.model_class, Seq2SeqHead) and case.has_auto_class]
WRITERS = [case for case in CASES if issubclass(case.model_class, TransformerForConditionalGeneration)]
REFERENCE_CASES = [case for case in WRITERS if case.has_reference]
OPTIONS = {"max_new_tokens": 7, "eos_token_id": None, "pad_token_id": 0, "no_repeat_ngram_size": 1}
CLASSIFIER = next(case for case in CASES if str(case) == "bart-AutoModelForSequenceClassification")


def sources(case: Case, side: str = "right") -> dict[str, Tensor]:
    """Three sources of different lengths."""
    batch = make_batch(case, (9, 4, 6), side=side)
    return {name: tensor for name, tensor in batch.items() if name in ("input_ids", "attention_mask")}


@pytest.mark.parametrize("case", WRITERS, ids=str)
@torch.no_grad()
def test_a_cache_gives_what_one_pass_gives(case: Case) -> None:
    """Several tokens at a time and one by one, by a growing cache and one of fixed length; with padding of targets."""
    model, batch = case.model(), make_batch(case, (9, 4, 6))
    ids = batch.pop("decoder_input_ids")
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    whole = model(**batch, decoder_input_ids=ids, decoder_attention_mask=mask).logits
    config = model.config.get_text_config(decoder=True)
    caches = (
        EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config)),
        EncoderDecoderCache(StaticCache(config=config, max_cache_len=9), StaticCache(config=config, max_cache_len=9)),
        None,
    )
    encoded = model.get_encoder()(**{name: batch[name] for name in ("input_ids", "attention_mask")})
    for cache in caches:
        found, start = [], 0
        for stop in (3, 4, 6):
            step = {"decoder_input_ids": ids[:, start:stop], "decoder_attention_mask": mask[:, :stop]}
            read = batch if start == 0 else {"attention_mask": batch["attention_mask"], "encoder_outputs": encoded}
            outputs = model(**read, **step, past_key_values=cache, use_cache=True)
            found.append(outputs.logits)
            start, cache = stop, outputs.past_key_values
        assert_close(torch.cat(found, 1)[mask == 1], whole[mask == 1])


@pytest.mark.parametrize("case", REFERENCE_CASES, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_generation_is_that_of_the_reference(case: Case, tmp_path: Path) -> None:
    """With sources padded on the right."""
    reference = case.reference_model(seed=0)
    reference.save_pretrained(tmp_path)
    ours = case.model_class.from_pretrained(tmp_path).eval()
    batch = sources(case)
    for mode in (
        {"do_sample": False},
        {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
        {"do_sample": False, "num_beams": 3, "length_penalty": 2.0, "repetition_penalty": 1.3},
        {"do_sample": False, "use_cache": False},
        {"do_sample": True, "top_k": 5, "top_p": 0.9},
    ):
        texts = []
        for model in (ours, reference):
            torch.manual_seed(0)
            texts.append(model.generate(**batch, **OPTIONS, **mode))
        assert torch.equal(*texts), mode
        assert len(texts[0].unique()) > 3, "too dull a text to tell anything"


@pytest.mark.parametrize("case", WRITERS, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_sources_alone_and_other_modes(case: Case) -> None:
    """Padding on either side, other rows and prompts of the decoder; assisted, and with a cache of fixed length."""
    model, left, right = case.model(), sources(case, "left"), sources(case)
    for beams in (1, 3):
        together = model.generate(**left, **OPTIONS, num_beams=beams, do_sample=False)
        assert torch.equal(model.generate(**right, **OPTIONS, num_beams=beams, do_sample=False), together)
        for row, length in enumerate((9, 4, 6)):
            alone = right["input_ids"][row : row + 1, :length]
            assert torch.equal(model.generate(alone, **OPTIONS, num_beams=beams, do_sample=False)[0], together[row])
    one = right["input_ids"][:1]
    expected = model.generate(one, **OPTIONS, do_sample=False)
    for mode in ({"assistant_model": case.model()}, {"cache_implementation": "static", "disable_compile": True}):
        assert torch.equal(model.generate(one, **OPTIONS, do_sample=False, **mode), expected), mode
    if "cross_attention_mask" in model.decoder_only_arguments:
        encoded, seen = model.get_encoder()(**right), right["attention_mask"].clone()
        seen[:, 1:3] = 0
        given = (right | {"cross_attention_mask": seen}, {"encoder_outputs": encoded, "attention_mask": seen}, right)
        how = {**OPTIONS, "num_beams": 3, "output_scores": True, "return_dict_in_generate": True}
        written = [model.generate(**each, **how) for each in given]
        assert all(type(each.past_key_values) is BeamSearchCache for each in written)
        masked, unseen, plain = (each.sequences_scores for each in written)
        assert_close(masked, unseen)
        assert not torch.allclose(masked, plain)
    begun = model.generate(one, decoder_input_ids=expected[:, :3], **OPTIONS | {"max_new_tokens": 5}, do_sample=False)
    assert torch.equal(begun, expected)


@pytest.mark.parametrize("case", WRITERS, ids=str)
def test_what_the_decoder_reads(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels after the start token; embeddings in place of ids; the decoder is computed up to the last label only."""
    model, batch = case.model(), make_batch(case, (9, 4, 6))
    given = batch.pop("decoder_input_ids")
    labels = make_targets(case, batch | {"decoder_input_ids": given})["labels"]
    labels[:, 0], labels[1, 2:] = 7, -100
    pad, start = model.config.pad_token_id, model.config.decoder_start_token_id
    shifted = F.pad(labels[:, :-1], (1, 0), value=start)
    shifted = shifted.masked_fill(shifted == -100, pad)
    assert torch.equal(model.prepare_decoder_input_ids_from_labels(labels), shifted)
    lengths: list[int] = []
    build = PackedLayout.build.__func__

    def spy(cls: type[PackedLayout], *args: object) -> PackedLayout:
        layout = build(cls, *args)
        lengths.append(layout.num_tokens)
        return layout

    monkeypatch.setattr(PackedLayout, "build", classmethod(spy))
    loss = model(**batch, labels=labels).loss
    steps = sum(int((row != -100).nonzero()[-1]) + 1 for row in labels)
    assert lengths == [19, steps, 19]
    assert steps < labels.numel()
    logits = model(**batch, decoder_input_ids=shifted).logits
    assert_close(loss, F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    table = model.base_model.decoder_word_embeddings
    embedded = model(**batch, decoder_inputs_embeds=table(shifted), labels=labels)
    assert_close(embedded.loss, loss)
    encoded = model.get_encoder()(**batch, return_dict=False, output_hidden_states=True)
    assert isinstance(encoded, tuple)
    read = {"encoder_outputs": encoded, "attention_mask": batch["attention_mask"]}
    cached = model(**read, labels=labels, use_cache=True)
    assert_close(cached.loss, loss)
    assert_close(torch.stack(cached.encoder_hidden_states), torch.stack(encoded[1]))
    assert cached.past_key_values.get_seq_length() == labels.shape[1]
    network = model.base_model(**read, decoder_input_ids=shifted)
    assert_close(torch.stack(network.encoder_hidden_states), torch.stack(encoded[1]))
    model.config.return_dict = False
    assert_close(model(**batch, labels=labels)[0], loss)
    assert_close(model.base_model(**batch, decoder_input_ids=shifted)[0], network.last_hidden_state)
    model.config.return_dict = True
    unpadded, padded = model(**batch, decoder_input_ids=given), case.model(unpad=False)
    mask = torch.ones_like(given)
    mask[0, :2] = 0
    got, wanted = (each(**batch, decoder_input_ids=given, decoder_attention_mask=mask) for each in (model, padded))
    assert_close(got.logits[mask == 1], wanted.logits[mask == 1])
    assert not torch.allclose(got.logits[0, -1], unpadded.logits[0, -1])
    with pytest.raises(CtxError, match="decoder_input_ids cannot be combined with decoder_inputs_embeds"):
        model(**batch, decoder_input_ids=given, decoder_inputs_embeds=table(given))


def test_a_decoder_with_a_table_of_its_own_is_resized_too(subtests, tmp_path: Path) -> None:
    """Written and opened again, with new tokens that the decoder reads."""
    for number, case in enumerate(each for each in WRITERS if hasattr(each.config(), "share_word_embeddings")):
        with subtests.test(str(case)), torch.no_grad():
            model, batch = case.model(tie_word_embeddings=False), make_batch(case, (9, 4, 6))
            before = model(**batch).logits
            model.resize_token_embeddings(before.shape[-1] + 9)
            assert_close(model(**batch).logits[..., :-9], before)
            batch["decoder_input_ids"][:, 1] = before.shape[-1] + 8
            model.save_pretrained(tmp_path / str(number))
            opened = case.model_class.from_pretrained(tmp_path / str(number)).eval()
            assert torch.equal(opened(**batch).logits, model(**batch).logits)
            assert not torch.allclose(opened(**batch).logits[:, 1, :-9], before[:, 1])


def packed(pairs: list[dict[str, Tensor]], name: str, side: str, fill: int = 0) -> Tensor:
    """(rows, width) of (1, length) tensors, two to a row, with two columns of padding or more."""
    rows = [torch.cat([pair[name][0] for pair in pairs[start : start + 2]]) for start in range(0, len(pairs), 2)]
    width = max(map(len, rows)) + 2
    pads = [(width - len(row), 0) if side == "left" else (0, width - len(row)) for row in rows]
    return torch.stack([F.pad(row, pad, value=fill) for row, pad in zip(rows, pads, strict=True)])


def test_pairs_packed_in_a_row_are_the_pairs_alone(subtests) -> None:
    """Logits, loss and gradients, with padding on either side; the target of a source may have no label."""
    for case in WRITERS:
        languages, pairs = {"n_langs": 2} if hasattr(case.config(), "n_langs") else {}, []
        for number, (length, steps) in enumerate([(5, 3), (8, 6), (4, 5), (7, 2)]):
            batch = make_batch(case, (length,), seed=number)
            ids = torch.randint(5, 60, (1, steps), generator=torch.Generator().manual_seed(number))
            pair = {"input_ids": batch["input_ids"], "labels": ids}
            pair |= {"sequence_ids": torch.full((1, length), 1 + number % 2)}
            pair |= {"decoder_sequence_ids": torch.full((1, steps), 1 + number % 2)}
            if languages:
                pair |= {
                    "langs": torch.full((1, length), number % 2),
                    "decoder_langs": 1 - torch.full_like(ids, number % 2),
                }
            pairs.append(pair)
        pairs[1]["labels"][0, 2], pairs[3]["labels"][:] = -100, -100
        alone = [{name: each for name, each in pair.items() if "sequence_ids" not in name} for pair in pairs]
        counts = torch.tensor(13)  # labels
        for side in ("right", "left"):
            together = {name: packed(pairs, name, side, -100 if name == "labels" else 0) for name in pairs[0]}
            for path, options in PATHS.items():
                with subtests.test(case=str(case), side=side, path=path):
                    model = case.model(**options, **languages)
                    loss = model(**together).loss
                    expected = sum(model(**pair, num_items_in_batch=counts).loss for pair in alone[:3])
                    assert_close(loss, expected)
                    assert_same_gradients(gradients(model, loss), gradients(model, expected))
                    with torch.no_grad():
                        logits = model(**together, return_logits=True).logits[together["decoder_sequence_ids"] != 0]
                        wanted = [model(**pair, return_logits=True).logits[0] for pair in alone]
                    assert_close(logits, torch.cat(wanted))
                    del together["decoder_sequence_ids"]
                    with pytest.raises(CtxError, match="Only one of sequence_ids and decoder_sequence_ids"):
                        model(**together)
                    together["decoder_sequence_ids"] = packed(pairs, "decoder_sequence_ids", side)


def _with_ends(ids: Tensor, *columns: list[int]) -> Tensor:
    """The ids with end tokens in these columns of each row, and nowhere else."""
    end = CLASSIFIER.config().eos_token_id
    ids = ids.masked_fill(ids == end, 9)
    for row, places in enumerate(columns):
        ids[row, places] = end
    return ids


def test_classification_reads_the_last_end_token(tmp_path: Path) -> None:
    """Of rows of any composition: as the reference where each row has as many, else as each row alone; with embeddings
    the last token's state."""
    reference = CLASSIFIER.reference_model(seed=3)
    reference.save_pretrained(tmp_path)
    model: PreTrainedModel = CLASSIFIER.model_class.from_pretrained(tmp_path).eval()
    batch = sources(CLASSIFIER)
    ids = _with_ends(batch["input_ids"], [2, 8], [0, 3], [1, 4])
    assert_close(model(**batch | {"input_ids": ids}).logits, reference(**batch | {"input_ids": ids}).logits)
    uneven = _with_ends(batch["input_ids"], [8], [1, 3], [0, 2, 4])
    together = model(**batch | {"input_ids": uneven})
    with pytest.raises(ValueError, match="same number of <eos>"):
        reference(**batch | {"input_ids": uneven})
    states = model.base_model(**batch | {"input_ids": uneven}).last_hidden_state
    for row, (length, end) in enumerate(((9, 8), (4, 3), (6, 4))):
        alone = model(uneven[row : row + 1, :length])
        assert_close(together.logits[row], alone.logits[0])
        assert_close(together.logits[row], model.classifier(states[row, end]))
    without = _with_ends(batch["input_ids"], [], [], [])
    last = model(**batch | {"input_ids": without}).logits
    assert_close(
        model(inputs_embeds=CLASSIFIER.embed_ids(model, without), attention_mask=batch["attention_mask"]).logits, last
    )
    recorded = model(**batch | {"input_ids": uneven}, output_hidden_states=True)
    assert_close(recorded.logits, together.logits)
    assert recorded.decoder_hidden_states[-1].shape == (3, 9, 32)


def test_what_an_encoder_holds_at_once_without_gradients() -> None:
    """Six states: a layer's input, that of the first one, and in attention queries, keys, values and context, or after
    the feed-forward network its input, output, sum and the normed sum."""
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    encoder = CtxBartModel(CtxBartConfig(vocab_size=50, decoder_layers=1, **shape)).eval().get_encoder()
    ids = torch.randint(5, 50, (64, 128))  # more rows than the feed-forward network computes at a time

    @torch.inference_mode()
    def step() -> None:
        encoder(input_ids=ids)

    assert peak_bytes(step, torch.device("cpu")) < 6.2 * ids.numel() * 32 * 4


@pytest.mark.parametrize("case", ALL_WRITERS, ids=str)
def test_the_mask_beside_encoder_outputs_is_that_of_the_source(case: Case) -> None:
    """One of another shape is an error, not broadcast; `generate` gives the whole one, also for parts of a prompt."""
    model, batch = case.model(), sources(case)
    encoded = model.get_encoder()(**batch)
    ids = torch.full((3, 4), 6)
    for shape in ((3, 1), (3, 5), (3, 11), (1, 9), (2, 9), (9,), (3, 9, 9)):
        for use_cache in (False, True):
            with pytest.raises(CtxError, match=r"attention_mask is .* but encoder_outputs have the shape"):
                model(
                    encoder_outputs=encoded,
                    attention_mask=torch.ones(shape, dtype=torch.long),
                    decoder_input_ids=ids,
                    use_cache=use_cache,
                )
    prompt = {"decoder_input_ids": ids, "do_sample": False, **OPTIONS}
    whole = model.generate(**batch, **prompt)
    assert torch.equal(model.generate(**batch, **prompt, prefill_chunk_size=2), whole)
