"""Generation with XLNet against the reference, and further outputs of `generate` of all generating models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import tiny_pair
from transformers import PreTrainedModel
from transformers.generation import StopStringCriteria
from zoo import HEADS, Case, assert_close, make_batch, make_targets

from hf_ctxmodels import CtxError
from hf_ctxmodels.heads.stop_strings import DecodedStopStrings
from hf_ctxmodels.layers.cpu.linear import active_prepacked_weights
from hf_ctxmodels.registry import FAMILIES

GENERATING_CASES = [head for head in HEADS if head.has_auto_class and head.model_class.can_generate()]
XLNET_CASE = Case(FAMILIES["xlnet"], "AutoModelForCausalLM")
PROMPTS = torch.randint(5, 61, (2, 6), generator=torch.Generator().manual_seed(1))
OPTIONS = {"max_new_tokens": 9, "no_repeat_ngram_size": 1, "eos_token_id": None, "pad_token_id": 0}


def reference_and_model(folder: Path, **overrides: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    reference = XLNET_CASE.reference_model(2, initializer_range=0.3, **overrides)
    reference.save_pretrained(folder)
    return reference, XLNET_CASE.auto_class.from_pretrained(folder).eval()


def build_model(folder: Path, **overrides: Any) -> PreTrainedModel:
    XLNET_CASE.model(2, initializer_range=0.3, **overrides).save_pretrained(folder)
    return XLNET_CASE.auto_class.from_pretrained(folder).eval()


@pytest.mark.parametrize(
    "strategy",
    [
        {"do_sample": False},
        {"do_sample": True, "top_k": 20},
        {"num_beams": 3, "do_sample": False},
        {"do_sample": False, "use_mems": False},
    ],
    ids=["greedy", "sampling", "beams", "no memory"],
)
@pytest.mark.parametrize("mem_len", [None, 5, 512])
@pytest.mark.filterwarnings("ignore")
def test_xlnet_generation_matches_reference(mem_len: int | None, strategy: dict[str, Any], tmp_path: Path) -> None:
    sequences = []
    for model in reference_and_model(tmp_path, mem_len=mem_len):
        torch.manual_seed(0)
        sequences.append(model.generate(PROMPTS, **OPTIONS, **strategy))
    assert sequences[0].shape == (2, 15)
    assert len(sequences[0][:, 6:].unique()) > 4, "too few distinct tokens"
    assert torch.equal(*sequences)


def test_xlnet_inputs_with_memory(tmp_path: Path) -> None:
    """With a memory, only the last two tokens and the target are read, and the memory excludes these two."""
    model = build_model(tmp_path, mem_len=None)
    ids = torch.randint(5, 61, (1, 12), generator=torch.Generator().manual_seed(3))
    inputs = model.prepare_inputs_for_generation(ids)
    assert inputs["input_ids"].shape == (1, 13)
    with torch.no_grad():
        output = model(**inputs)
    cached = model.prepare_inputs_for_generation(torch.cat([ids, ids[:, :1]], 1), past_key_values=output.mems)
    assert cached["input_ids"].shape == (1, 3)
    assert [memory.shape[1] for memory in cached["mems"]] == [11] * 3


def test_padded_prompts_match_unpadded_generation(tmp_path: Path) -> None:
    model = build_model(tmp_path)
    padded = PROMPTS.clone()
    padded[1, :3] = 0
    mask = (padded != 0).long()
    batched = model.generate(padded, attention_mask=mask, do_sample=False, **OPTIONS)
    unpadded = model.generate(padded[1:, 3:], do_sample=False, **OPTIONS)
    assert torch.equal(batched[1, 6:], unpadded[0, 3:])


def test_token_types_change_generation(tmp_path: Path) -> None:
    """`generate` accepts the token types that a tokenizer returns."""
    model = build_model(tmp_path)
    token_types = torch.zeros_like(PROMPTS)
    expected = model.generate(PROMPTS, token_type_ids=token_types, do_sample=False, **OPTIONS)
    assert expected.shape == (2, 15)
    token_types[:, 3:] = 1
    changed = model.generate(PROMPTS, token_type_ids=token_types, do_sample=False, **OPTIONS)
    assert not torch.equal(expected, changed)


@pytest.mark.parametrize("case", GENERATING_CASES, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_hidden_states_and_attentions_of_all_steps(case: Case) -> None:
    """Equal to one forward pass over the sequence; attention weights if the model has any."""
    model, batch = case.model(), make_batch(case, (5, 3), side="left")
    batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
    records = {"output_hidden_states": True, "output_attentions": True}
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    outputs = model.generate(**batch, **options, **records, return_dict_in_generate=True)
    assert torch.equal(outputs.sequences, model.generate(**batch, **options))
    beams = model.generate(**batch, **options, **records, num_beams=2, return_dict_in_generate=True)
    names = [name for name in outputs if name.endswith(("hidden_states", "attentions"))]
    for name in names:
        assert beams[name] is not None
        if name.startswith("encoder"):
            assert all(len(state) == 2 for state in outputs[name])
        else:
            assert len(outputs[name]) == 3
    if case.model_class is XLNET_CASE.model_class:  # each step reads the text so far and the target token
        assert all(len(step) == 2 * model.config.num_hidden_layers + 2 for step in outputs.hidden_states)
        assert all(len(step) == model.config.num_hidden_layers for step in outputs.attentions)
        return
    read_ids = outputs.sequences[:, :-1]
    with torch.no_grad():
        if case.is_seq2seq:
            forward = model(**batch, decoder_input_ids=read_ids, **records)
            assert any(state.any() for state in outputs.encoder_hidden_states)
        else:
            mask = torch.cat([batch["attention_mask"], torch.ones_like(read_ids[:, batch["input_ids"].shape[1] :])], 1)
            forward = model(input_ids=read_ids, attention_mask=mask, **records)
    for name in [name for name in names if not name.startswith("encoder")]:
        if forward.get(name) is None:
            assert not any(outputs[name])
            continue
        assert len(forward[name]) > 0
        for layer, expected in enumerate(forward[name]):
            steps = [step[layer] for step in outputs[name]]
            width = expected.shape[-1]  # with a cache, a step has only the keys so far
            actual = torch.cat([torch.nn.functional.pad(step, (0, width - step.shape[-1])) for step in steps], -2)
            assert_close(actual, expected, f"{name}[{layer}]")


@pytest.mark.parametrize("case", GENERATING_CASES, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_transition_scores_and_watermark(case: Case) -> None:
    """Both depend on the size of the target vocabulary, which can differ from that of the source."""
    model, batch = case.model(), make_batch(case, (5, 3), side="left")
    batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 4, "num_beams": 2, "eos_token_id": None}
    outputs = model.generate(**batch, **options, return_dict_in_generate=True, output_scores=True, do_sample=False)
    scores = model.compute_transition_scores(outputs.sequences, outputs.scores, outputs.beam_indices)
    assert_close(scores.mean(1), outputs.sequences_scores, "sum of the scores of the tokens")
    normalized = model.compute_transition_scores(outputs.sequences, outputs.scores, outputs.beam_indices, True)
    assert normalized.shape == (2, 4)
    watermarked = model.generate(**batch, **options, do_sample=False, watermarking_config={"greenlist_ratio": 0.2})
    assert watermarked.shape == outputs.sequences.shape


@pytest.mark.parametrize("case", GENERATING_CASES, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_generation_with_prepacked_weights(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits equal those without prepacking; copies are freed afterwards, and none is made if prepacked_bytes is 0."""
    model, copies = case.model(2), []
    pack = torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(
        torch.ops.mkldnn, "_reorder_linear_weight", lambda weight, rows: (copies.append(weight), pack(weight, rows))[1]
    )
    batch = {name: tensor for name, tensor in make_batch(case, (5, 3), side="left").items() if name != "token_type_ids"}
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    prepacked = model.generate(**batch, **options)
    assert copies
    if model.get_output_embeddings() is not None:
        assert prepacked.logits[0].shape[-1] in {len(weight) for weight in copies}
    assert active_prepacked_weights() is None
    copies.clear()
    model.prepacked_bytes = 0
    unpacked = model.generate(**batch, **options)
    assert not copies
    assert torch.equal(prepacked.sequences, unpacked.sequences)
    assert_close(torch.stack(prepacked.logits), torch.stack(unpacked.logits))


@pytest.mark.parametrize(
    "case", [case for case in GENERATING_CASES if case.model_class.supports_gradient_checkpointing], ids=str
)
@pytest.mark.filterwarnings("ignore")
def test_generation_with_gradient_checkpointing(case: Case) -> None:
    """Checkpointing of a model in training mode does not change the text; the models have no dropout."""
    model, inputs = case.model().train(), make_batch(case)["input_ids"] if case.is_seq2seq else PROMPTS
    sequences = []
    for _ in range(2):
        torch.manual_seed(0)
        sequences.append(model.generate(inputs, **OPTIONS, do_sample=False))
        model.activation_checkpointing_enable()
    assert torch.equal(*sequences)


@pytest.mark.parametrize("case", [case for case in GENERATING_CASES if not case.is_seq2seq], ids=str)
@pytest.mark.parametrize("has_negative_prompt", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_classifier_free_guidance(case: Case, has_negative_prompt: bool) -> None:
    """Guided greedy search matches an explicit loop, with XLNet's memory, since it sees only the tokens so far.

    A state gives the same sequences as encoding the text again, also under beam search.
    """
    model, scale = case.model(), 4.0
    negative = torch.tensor([[7, 9], [8, 6]]) if has_negative_prompt else PROMPTS[:, -1:]
    options: dict[str, Any] = {**OPTIONS, "max_new_tokens": 5, "guidance_scale": scale, "do_sample": False}
    if has_negative_prompt:
        options["negative_prompt_ids"] = negative
    plain = model.generate(PROMPTS, **{**options, "guidance_scale": None, "negative_prompt_ids": None})

    def log_probabilities(ids: torch.Tensor, prompt: str) -> torch.Tensor:
        memory = {"past_key_values": memories.get(prompt)} if case == XLNET_CASE else {}
        outputs = model(**model.prepare_inputs_for_generation(ids, attention_mask=torch.ones_like(ids), **memory))
        memories[prompt] = outputs.get("mems")
        return outputs.logits[:, -1].log_softmax(-1)

    ids, memories = PROMPTS, {}
    with torch.no_grad():
        for _ in range(5):
            conditional = log_probabilities(ids, "prompt")
            unconditional = log_probabilities(torch.cat([negative, ids[:, 6:]], 1), "negative prompt")
            scores = scale * (conditional - unconditional) + unconditional
            scores = scores.scatter(1, ids, -torch.inf)  # no_repeat_ngram_size of 1
            ids = torch.cat([ids, scores.argmax(-1, keepdim=True)], 1)
    guided = model.generate(PROMPTS, **options)
    assert torch.equal(guided, ids)
    assert not torch.equal(guided, plain)
    if getattr(model, "state_outputs", ()):  # transformers continues from the keys and values of other beams
        beams = [model.generate(PROMPTS, **options, num_beams=4, use_cache=use_cache) for use_cache in (True, False)]
        assert torch.equal(*beams)


@pytest.mark.parametrize("case", [case for case in GENERATING_CASES if case.is_seq2seq], ids=str)
def test_encoder_decoders_reject_guidance(case: Case) -> None:
    with pytest.raises(CtxError, match="guidance_scale"):
        case.model().generate(make_batch(case)["input_ids"], max_new_tokens=2, guidance_scale=1.5)


@pytest.mark.parametrize("case", [case for case in GENERATING_CASES if not case.is_seq2seq], ids=str)
def test_logits_to_keep(case: Case) -> None:
    """Logits are selected as in transformers; the loss does not change."""
    model, batch = case.model(), make_batch(case)
    all_logits = model(**batch).logits
    targets = make_targets(case, batch)
    for logits_to_keep, expected in (
        (0, all_logits),
        (1, all_logits[:, -1:]),
        (3, all_logits[:, -3:]),
        (torch.tensor([0, 4]), all_logits[:, [0, 4]]),
        (batch["attention_mask"].bool(), all_logits[batch["attention_mask"].bool()]),
    ):
        assert_close(model(**batch, logits_to_keep=logits_to_keep).logits, expected)
        outputs = model(**batch, **targets, logits_to_keep=logits_to_keep, return_logits=True)
        assert_close(outputs.logits, expected)
        assert_close(outputs.loss, model(**batch, **targets).loss)
    assert model._supports_logits_to_keep()


@pytest.mark.parametrize("case", GENERATING_CASES, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_stop_strings(case: Case) -> None:
    """Generation ends with the first token after which the decoded text contains a stop string."""
    pairs = ["the cat saw a small garden\tdie Katze sah den Garten", "a dog\tein Hund"]
    model, tokenizer = tiny_pair(case.family.name, case.auto_name, pairs, target_vocab_size=10)
    batch = tokenizer(["the cat saw"], return_tensors="pt")
    decode = tokenizer.batch_decode if getattr(tokenizer, "target_words", None) is None else tokenizer.decode_target
    options = {**batch, "do_sample": False, "eos_token_id": None, "no_repeat_ngram_size": 1}
    ids = model.generate(**options, max_new_tokens=8)[0]
    texts = decode([ids[:stop].tolist() for stop in range(len(ids) - 8, len(ids) + 1)])
    string = next(text for text in texts if len(text) > len(texts[0]) + 3)[-3:]
    length = next(index for index, text in enumerate(texts) if text.count(string) > texts[0].count(string))
    stopped = model.generate(**options, max_new_tokens=8, stop_strings=["never", string], tokenizer=tokenizer)
    assert stopped[0].tolist() == ids[: len(ids) - 8 + length].tolist()


@pytest.mark.parametrize("string", ["é", "saw a", "garden", " sm", "aa", "aba"])
def test_stop_strings_match_transformers(string: str) -> None:
    """The same stops as by `StopStringCriteria`, which needs an alphabet of bytes."""
    _, tokenizer = tiny_pair("gpt2", "AutoModelForCausalLM", ["the cat saw a small garden é"])
    ids = tokenizer("the cat saw a small garden é café aaaa ababa", return_tensors="pt").input_ids
    stops, expected = (
        [bool(criterion(ids[:, :length], None)) for length in range(1, ids.shape[1] + 1)]
        for criterion in (DecodedStopStrings([string], tokenizer), StopStringCriteria(tokenizer, [string]))
    )
    assert any(stops)
    assert stops == expected
