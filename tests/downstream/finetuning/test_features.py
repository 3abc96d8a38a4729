"""Heads on a frozen encoder: learned layer mix and cached encoder states."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training_runs import arguments
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification
from zoo import HEADS, Case, as_subtests, assert_close, make_batch

from hf_ctxmodels import CtxError
from hf_ctxmodels.downstream.finetuning import freeze_encoder
from hf_ctxmodels.downstream.finetuning.feature_cache import FeatureCache, cache_features
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.accelerator import make_accelerator
from hf_ctxmodels.training.loop import TrainingLoop
from hf_ctxmodels.training.training_step import EpochIndexed

TASKS = ("SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice")
TASK_HEADS = [case for case in HEADS if case.auto_name.removeprefix("AutoModelFor") in TASKS and case.has_auto_class]
BERT = Case(FAMILIES["bert"], "AutoModelForSequenceClassification")
BART = Case(FAMILIES["bart"], "AutoModelForSequenceClassification")


def logits(output: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in output.items() if name.endswith("logits")}


@as_subtests(TASK_HEADS)
@torch.no_grad()
def test_layer_mix_and_cached_states_match_plain_head(case: Case) -> None:
    """Logits are unchanged by cached states, and by a mix with all weight on the last layer."""
    plain, batch = case.model().eval(), make_batch(case)
    has_layers = hasattr(plain.base_model, "layers") or case.auto_name.endswith("TokenClassification")
    has_decoder = hasattr(plain.base_model, "decoder")
    if not (has_decoder or (has_layers and case.family.name not in ("word2vec", "glove"))):
        with pytest.raises(CtxError, match="no layers that could be mixed"):
            case.model(layer_mix=True)
        return
    model = case.model(layer_mix=True).eval()
    expected = logits(plain(**batch))
    if model.layer_mix is None:  # heads of ELMo and CVT already read several layers
        assert case.family.name in ("elmo", "cvt")
    else:
        assert not model.load_state_dict(plain.state_dict(), strict=False).unexpected_keys
        model.layer_mix.weights.copy_(torch.tensor([-100.0] * (len(model.layer_mix.weights) - 1) + [100.0]))
        model.layer_mix.gamma.fill_(1.0)
        for name, value in logits(output := model(**batch)).items():
            assert_close(value, expected[name], name)
        assert not [name for name in output if name.endswith("hidden_states")], "hidden states were not requested"
        if has_decoder:
            check_decoder_mix(case, model, batch)
    freeze_encoder(plain)
    plain.feature_lookup = FeatureCache(plain)
    for name, value in logits(plain(**batch)).items():
        assert_close(value, expected[name], name)
    if has_decoder:
        with pytest.raises(CtxError, match="cached only for token ids"):
            plain(**batch, decoder_input_ids=batch["input_ids"])


def check_decoder_mix(case: Case, model: Any, batch: dict[str, Any]) -> None:
    """With equal weights for the embeddings and the last layer, the head reads the mean of their states."""
    model.layer_mix.weights.copy_(torch.tensor([0.0] + [-100.0] * (len(model.layer_mix.weights) - 2) + [0.0]))
    states = model.base_model(
        **{k: v for k, v in batch.items() if k in ("input_ids", "attention_mask")}, output_hidden_states=True
    )
    states = (states.decoder_hidden_states[0] + states.decoder_hidden_states[-1]) / 2
    output = model(**batch, output_hidden_states=True)
    assert len(output.decoder_hidden_states) == model.config.decoder_layers + 1 == len(model.layer_mix.weights)
    assert len(output.encoder_hidden_states) == model.config.num_hidden_layers + 1
    if case.auto_name.endswith("QuestionAnswering"):
        assert_close(torch.stack([output.start_logits, output.end_logits], -1), model.qa_outputs(states))
        return
    for row, row_logits in enumerate(output.logits):
        tokens = [column for column, is_token in enumerate(batch["attention_mask"][row].tolist()) if is_token]
        ends = [column for column in tokens if batch["input_ids"][row, column] == model.config.eos_token_id]
        assert_close(row_logits, model.classifier(states[row, (ends or tokens)[-1]]))


def test_layer_mix_is_weighted_sum_and_saved(tmp_path: Path) -> None:
    """A new mix is the mean; `from_pretrained` loads a saved one; other heads and the export have none."""
    model, batch = BERT.model_class(BERT.config(layer_mix=True)).eval(), make_batch(BERT)
    assert model.layer_mix.weights.tolist() == [0.0] * (len(model.bert.layers) + 1)
    with torch.no_grad():
        model.layer_mix.weights.copy_(torch.arange(len(model.layer_mix.weights)) * 0.3)
        model.layer_mix.gamma.fill_(0.7)
        states = model.bert(**batch, output_hidden_states=True).hidden_states
        shares = torch.exp(model.layer_mix.weights)
        mixed = 0.7 * sum(share * state for share, state in zip(shares / shares.sum(), states))
        expected = model.classifier(model.bert.pooler(mixed[:, 0]))
        assert_close(model(**batch).logits, expected)
        model.save_pretrained(tmp_path)
        assert_close(AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()(**batch).logits, expected)
        assert "layer_mix" not in dict(AutoModelForMaskedLM.from_pretrained(tmp_path).named_modules())
    with pytest.raises(CtxError, match="layer_mix"):
        model.export_reference(tmp_path / "reference")
    plain = BERT.model()
    plain.save_pretrained(tmp_path / "plain")
    config = BERT.config(layer_mix=True)
    reloaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain", config=config)
    assert reloaded.layer_mix.gamma.tolist() == [1.0]  # as in a new model
    assert reloaded.layer_mix.weights.tolist() == [0.0] * (len(model.bert.layers) + 1)


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in rows)
    padded = [row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows]
    mask = [[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows]
    return {
        "input_ids": torch.tensor(padded),
        "attention_mask": torch.tensor(mask),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def make_rows(number: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 12, (number,), generator=generator).tolist()
    return [
        {"input_ids": torch.randint(6, 40, (length,), generator=generator).tolist(), "labels": index % 2}
        for index, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("case", [BERT, BART], ids=str)
def test_cached_states_keep_losses_bit_identical(tmp_path: Path, monkeypatch: Any, case: Case) -> None:
    """With one row per batch, in the run that fills the cache and in a run that reads it."""
    rows = make_rows(12)

    def losses(name: str, cache: Path | None, batch_size: int) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = case.model(layer_mix=True, hidden_dropout_prob=0.2)
        freeze_encoder(model)
        if cache is not None:
            cache_features(model, cache, [collate([row]) for row in rows], "", show_progress=False)
        options = arguments(
            tmp_path / name, max_steps=6, per_device_batch_size=batch_size, gradient_accumulation_steps=4 // batch_size
        )
        result = TrainingLoop(model, EpochIndexed(rows), collate, options, make_accelerator(options)).run()  # type: ignore[arg-type]
        curve = [record["loss"] for record in result.curve if "loss" in record]
        return curve, load_file(tmp_path / name / "model.safetensors")

    uncached, weights = losses("uncached", None, 1)
    for name in ("filling", "reading"):
        cached_losses, cached_weights = losses(name, tmp_path / "cache", 1)
        assert cached_losses == uncached, name
        assert all(torch.equal(value, cached_weights[key]) for key, value in weights.items())
    (folder,) = (tmp_path / "cache").iterdir()
    calls = []
    monkeypatch.setattr(case.model_class.encoder_class, "forward", lambda *args, **kwargs: calls.append(1))
    losses("whole", tmp_path / "cache", 4)
    assert not calls
    states = load_file(folder / "states-00000.safetensors")["states"]
    index = json.loads((folder / "index.json").read_text())
    assert len(states) == sum(len(row["input_ids"]) for row in rows)
    assert len(index["places"]) == len(rows)


def interrupt(*arguments: Any, **options: Any) -> None:
    raise KeyboardInterrupt


def test_interrupted_and_damaged_caches(tmp_path: Path, monkeypatch: Any) -> None:
    """An interruption leaves no cache; other weights or examples have separate caches; damaged files raise."""
    rows, model = [collate([row]) for row in make_rows(5)], BERT.model()
    with pytest.raises(CtxError, match="frozen encoder"):
        cache_features(model, tmp_path / "cache", rows, "")
    seq2seq = Case(FAMILIES["bart"], "AutoModelForSeq2SeqLM").model(tie_word_embeddings=False)
    freeze_encoder(seq2seq)
    with pytest.raises(CtxError, match="does not generate text"):
        cache_features(seq2seq, tmp_path / "cache", rows, "")
    freeze_encoder(model)
    monkeypatch.setattr("hf_ctxmodels.downstream.finetuning.feature_cache._SHARD_TOKENS", 8)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupt)  # after all files of the cache are written
        with pytest.raises(KeyboardInterrupt):
            cache_features(model, tmp_path / "cache", rows, "", show_progress=False)
    assert list((tmp_path / "cache").iterdir()) == []
    with monkeypatch.context() as patch:
        patch.setattr(BERT.model_class, "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cache_features(model.train(), tmp_path / "cache", rows, "", show_progress=False)
    assert model.training
    model.eval()
    cache_features(model, tmp_path / "cache", rows, "", show_progress=False)
    (folder,) = (tmp_path / "cache").iterdir()
    assert len(list(folder.glob("states-*.safetensors"))) > 2
    batch = {name: torch.cat([row[name][:, :3] for row in rows]) for name in ("input_ids", "attention_mask")}
    assert torch.isfinite(model(**batch).logits).all()  # uncached rows are computed
    with torch.no_grad():
        model.bert.layers[0].feed_forward.up_proj.weight.add_(1.0)
    cache_features(model, tmp_path / "cache", rows, "", show_progress=False)
    cache_features(model, tmp_path / "cache", rows[:4], "", show_progress=False)
    cache_features(model, tmp_path / "cache", rows[:4], "another", show_progress=False)
    folders = list((tmp_path / "cache").iterdir())
    assert len(folders) == 4
    for folder in folders:
        (folder / "states-00000.safetensors").write_bytes(b"")
    with pytest.raises(CtxError, match="damaged"):
        cache_features(model, tmp_path / "cache", rows, "", show_progress=False)
