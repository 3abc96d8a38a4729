"""Translation with cross-view training: losses and gradients compared with loops, hard targets, fine-tuning."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_command
from recurrent_decoders import cvt, cvt_attention_vector, cvt_states
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from zoo import Case, assert_same_gradients, gradients, make_batch, make_targets

from hf_ctxmodels import CtxCoveTokenizer, CtxCvtTokenizer, CtxError
from hf_ctxmodels.data import UnlabeledCollator, mark_unlabeled
from hf_ctxmodels.data.padding import SourceTargetCollator
from hf_ctxmodels.inference import generate_texts
from hf_ctxmodels.models.cvt.configuration_cvt import TARGET_VIEWS
from hf_ctxmodels.objectives import Translation
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.training_log import read_log

CASE = Case(FAMILIES["cvt"], "AutoModelForSeq2SeqLM")
LENGTHS = (7, 3, 1, 5)
END = 44  # some hard targets of the tiny model end with this word
FIELDS = {"initializer_range": 0.9, "eos_token_id": END}
UNLABELED = torch.tensor([1, 1, -100, 1])
PAIRS = ["a red cat\teine rote Katze.", "the dog\tder Hund, er"]
WORDS = {"red": "rot", "cat": "katze", "sees": "sieht", "one": "ein", "big": "gross", "dog": "hund"}


def build_model(**overrides: Any) -> Any:
    return CASE.model(3, **{**FIELDS, **overrides})


def row_ids(batch: dict[str, Tensor], row: int) -> Tensor:
    """The ids of a row without padding."""
    return batch["input_ids"][row][batch["attention_mask"][row] == 1]


def sources(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def hard_targets(model: nn.Module, ids: Tensor) -> list[int]:
    """The output of beam search for one source, up to the end token."""
    config = model.config
    options = {"num_beams": config.hard_target_beams, "max_new_tokens": config.hard_target_max_length}
    target = model.generate(ids[None], **options, do_sample=False)[0, 1:].tolist()
    return target[: target.index(END) + 1] if END in target else target


def auxiliary_loss(model: nn.Module, ids: Tensor, target: list[int], *, use_attention: bool = True) -> Tensor:
    """The loss of the auxiliary decoders for one source, word by word."""
    source, states = cvt_states(model, ids, [model.config.decoder_start_token_id, *target[:-1]])
    total = torch.zeros(())
    for name, auxiliary in model.auxiliary.items():
        offset, attends = (1, True) if name == "future_view" else (0, use_attention)
        losses = [
            -auxiliary.prediction(
                cvt_attention_vector(auxiliary.context, source, hidden, use_attention=attends)
            ).log_softmax(0)[word]
            for hidden, word in zip(states, target[offset:], strict=False)
        ]
        total = total + torch.stack(losses).mean() if losses else total
    return total


class TestLosses:
    @pytest.mark.parametrize("side", ["right", "left"])
    @pytest.mark.parametrize("unpad", [True, False])
    def test_auxiliary_decoder_losses(self, side: str, unpad: bool) -> None:
        """Values and gradients equal a loop over single sources; one of the four is not selected."""
        model, batch = build_model(unpad=unpad), make_batch(CASE, LENGTHS, side=side)
        targets = {row: hard_targets(model, row_ids(batch, row)) for row in (0, 1, 3)}
        assert len({len(target) for target in targets.values()}) > 1, "hard targets of equal length"
        losses = [auxiliary_loss(model, row_ids(batch, row), target) for row, target in targets.items()]
        expected = torch.stack(losses).mean()
        output = model(**sources(batch), views=UNLABELED)
        assert (output.logits, output.supervised_loss) == (None, None)
        torch.testing.assert_close(output.loss, expected)
        torch.testing.assert_close(output.cross_view_loss, expected)
        assert_same_gradients(gradients(model, output.loss), gradients(model, expected))

    @pytest.mark.parametrize("side", ["right", "left"])
    def test_labeled_and_unlabeled_sources_in_one_batch(self, side: str) -> None:
        model, batch = build_model(view_weight=0.3), make_batch(CASE, LENGTHS, side=side)
        labels = make_targets(CASE, batch)["labels"]
        labels[1:] = -100
        views = torch.where(torch.arange(4) > 0, 1, -100)
        output = model(**batch, labels=labels, views=views)
        inputs, ids = batch["decoder_input_ids"][0].tolist(), row_ids(batch, 0)
        source, states = cvt_states(model, ids, inputs)
        log_probs = torch.stack(
            [model.prediction(cvt_attention_vector(model.context, source, h)).log_softmax(0) for h in states]
        )
        torch.testing.assert_close(log_probs, cvt(model, ids, inputs))
        supervised = nn.functional.nll_loss(log_probs, labels[0], ignore_index=-100)
        losses = [
            auxiliary_loss(model, row_ids(batch, row), hard_targets(model, row_ids(batch, row))) for row in range(1, 4)
        ]
        cross_view = 0.3 * torch.stack(losses).mean()
        torch.testing.assert_close(output.supervised_loss, supervised)
        torch.testing.assert_close(output.cross_view_loss, cross_view)
        torch.testing.assert_close(output.loss, supervised + cross_view)
        assert_same_gradients(gradients(model, output.loss), gradients(model, supervised + cross_view))

    def test_attention_view_dropout(self) -> None:
        """With all attention weights dropped, the "attention" view depends on the source only by the initial state; the
        "future" view is not changed."""
        rates = {"view_dropout": 0.0, "attention_view_dropout": 1.0}
        model, batch = build_model(**rates).train(), make_batch(CASE, LENGTHS)
        loss = model(**sources(batch), views=UNLABELED).loss
        ids = [row_ids(batch, row) for row in (0, 1, 3)]
        losses = [auxiliary_loss(model, words, hard_targets(model.eval(), words), use_attention=False) for words in ids]
        torch.testing.assert_close(loss, torch.stack(losses).mean())

    def test_dropout_applies_only_to_auxiliary_decoders(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rates = {"hidden_dropout_prob": 0.5, "word_dropout": 0.5}
        model, batch = build_model(**rates).train(), make_batch(CASE, LENGTHS)
        model.auxiliary["future_view"].eval()  # a frozen module
        generated, generate = [], model.generate_hard_targets
        monkeypatch.setattr(
            model, "generate_hard_targets", lambda **inputs: generated.append(generate(**inputs)) or generated[-1]
        )
        losses = {model(**sources(batch), views=torch.ones(4, dtype=torch.long)).loss.item() for _ in range(3)}
        assert len(losses) == 3
        assert all(torch.equal(targets, generated[0]) for targets in generated)
        assert [name for name, module in model.named_modules() if not module.training] == [
            name for name, _ in model.named_modules() if name.startswith("auxiliary.future_view")
        ]
        assert torch.equal(generate(**sources(batch)), build_model().generate_hard_targets(**sources(batch)))

    def test_view_dropout_overrides_other_rates(self) -> None:
        rates = {"hidden_dropout_prob": 0.5, "word_dropout": 0.5, "view_dropout": 0.0, "attention_view_dropout": 0.0}
        model, batch = build_model(**rates).train(), make_batch(CASE, LENGTHS)
        labels = make_targets(CASE, batch)["labels"]
        ignored = torch.full_like(labels, -100)
        unlabeled = {model(**sources(batch), labels=ignored, views=UNLABELED).loss.item() for _ in range(3)}
        assert len(unlabeled) == 1, "dropout with view_dropout=0"
        assert len({model(**sources(batch), labels=labels).loss.item() for _ in range(3)}) == 3

    def test_parameters_trained_by_each_loss(self) -> None:
        """Both losses train the encoder and the LSTM; each attention and softmax layer is trained by one loss."""
        model, batch = build_model(), make_batch(CASE, LENGTHS)
        labels = make_targets(CASE, batch)["labels"]

        def trained_modules(**targets: Tensor) -> set[str]:
            model.zero_grad(set_to_none=True)
            model(**sources(batch), **targets).loss.backward()
            parameters = model.named_parameters()
            trained = {name for name, value in parameters if value.grad is not None and value.grad.any()}
            return {
                ".".join(name.split(".")[: 2 if name.startswith(("auxiliary", "decoder")) else 1]) for name in trained
            }

        shared = {"cvt", "decoder.embeddings", "decoder.layer", "decoder.first_hidden", "decoder.first_cell"}
        assert trained_modules(labels=labels) == {*shared, "context", "prediction"}
        assert trained_modules(views=UNLABELED) == {*shared, "auxiliary.attention_view", "auxiliary.future_view"}
        assert all(
            parameter.grad is None for parameter in [*model.context.parameters(), *model.prediction.parameters()]
        )

    def test_microbatch_losses_add_up(self) -> None:
        """With the number of sources in the full batch, for gradient accumulation."""
        model, batch = build_model(), make_batch(CASE, LENGTHS)
        expected = model(**sources(batch), views=UNLABELED).loss
        losses = [
            model(
                input_ids=batch["input_ids"][rows],
                attention_mask=batch["attention_mask"][rows],
                views=UNLABELED[rows],
                num_items_in_batch={"labels": 0, "views": 3},
            ).loss
            for rows in (slice(0, 3), slice(3, 4))
        ]
        torch.testing.assert_close(torch.stack(losses).sum(), expected)

    def test_gradients_under_autocast(self) -> None:
        """Weights cast without gradient in beam search are cast again for the loss."""
        model, batch = build_model(), make_batch(CASE, LENGTHS)
        expected = gradients(model, model(**sources(batch), views=UNLABELED).loss)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**sources(batch), views=UNLABELED).loss
        actual = gradients(model, loss)
        assert {name for name, value in actual.items() if value is not None and value.any()} == {
            name for name, value in expected.items() if value is not None and value.any()
        }

    def test_selected_views(self) -> None:
        batch = make_batch(CASE, LENGTHS)
        losses = []
        for views in ([name] for name in TARGET_VIEWS):
            model = build_model(views=views)
            assert [*model.auxiliary] == [f"{views[0]}_view"]
            losses.append(model(**sources(batch), views=UNLABELED).loss.item())
        assert len({*losses}) == 2
        with pytest.raises(CtxError, match=r"(?s)no auxiliary decoder.*attention, future"):
            build_model(views=["past"])(**sources(batch), views=UNLABELED)


class TestHardTargets:
    def test_hard_targets_match_beam_search(self) -> None:
        model, batch = build_model(hard_target_beams=3), make_batch(CASE, LENGTHS)
        targets = model.generate_hard_targets(**sources(batch))
        expected = model.generate(**sources(batch), num_beams=3, max_new_tokens=7, do_sample=False)[:, 1:]
        assert torch.equal(targets, expected.masked_fill(targets == -100, -100))
        lengths = (targets != -100).sum(1)
        assert len(lengths.unique()) > 1
        for row, length in zip(expected.tolist(), lengths.tolist(), strict=True):
            assert END not in row[: length - 1]
            assert length == len(row) or row[length - 1] == END
        assert not targets.requires_grad

    @pytest.mark.parametrize("side", ["right", "left"])
    def test_hard_targets_are_independent_of_batch(self, side: str) -> None:
        model, batch = build_model(), make_batch(CASE, LENGTHS, width=9, side=side)
        for row, target in enumerate(model.generate_hard_targets(**sources(batch))):
            assert target[target != -100].tolist() == hard_targets(model, row_ids(batch, row))

    def test_hard_targets_from_inputs_embeds(self) -> None:
        model, batch = build_model(), make_batch(CASE, LENGTHS)
        embeddings = {
            "inputs_embeds": CASE.embed_ids(model, batch["input_ids"]).detach(),
            "attention_mask": batch["attention_mask"],
        }
        torch.testing.assert_close(
            model(**embeddings, views=UNLABELED).loss, model(**sources(batch), views=UNLABELED).loss
        )

    def test_single_word_targets_have_no_future_loss(self) -> None:
        """The future view predicts the word after the next one."""
        model, batch = build_model(hard_target_max_length=1, views=["future"]), make_batch(CASE, LENGTHS)
        assert model(**sources(batch), views=UNLABELED).loss.item() == 0


def test_invalid_views() -> None:
    model, batch = build_model(), make_batch(CASE, LENGTHS)
    encoded = model.encode(**sources(batch))
    for views, message in (
        (torch.ones(4, 6, dtype=torch.long), r"views is \(4, 6\), expected \(4,\)"),
        (torch.full((4,), 2), "views has 2"),
        (UNLABELED.float(), "views"),
    ):
        with pytest.raises(CtxError, match=message):
            model(**sources(batch), views=views)
    with pytest.raises(CtxError, match="cannot be combined with encoder_outputs"):
        model(**sources(batch), encoder_outputs=encoded, views=UNLABELED)
    with pytest.raises(CtxError, match="sequence_ids"):
        model(**batch, sequence_ids=batch["attention_mask"])
    expected = model.generate(**sources(batch), max_new_tokens=4)
    assert torch.equal(model.generate(**sources(batch), views=UNLABELED, max_new_tokens=4), expected)


class TestTokenizer:
    def test_target_vocabulary_requires_translations(self, tmp_path: Path) -> None:
        tokenizer = CtxCvtTokenizer.train(PAIRS, 40, min_count=1, min_target_count=1, target_lower_case=True)
        tokenizer.save_pretrained(tmp_path / "both")
        loaded = AutoTokenizer.from_pretrained(tmp_path / "both")
        cove_tokenizer = CtxCoveTokenizer.train(PAIRS, 40, min_count=1, min_target_count=1, target_lower_case=True)
        targets = ["eine Katze.", "Unbekannt Hund"]
        for bilingual in (tokenizer, loaded):
            assert bilingual.target_words == cove_tokenizer.target_words
            assert bilingual(text_target=targets).input_ids == cove_tokenizer(text_target=targets).input_ids
            assert bilingual.decode_target(bilingual(text_target=targets).input_ids) == ["eine katze.", "[UNK] hund"]
            encoded = bilingual(["a cat", "the"], text_target=targets, padding=True)  # pads the targets as well
            source_only = CtxCvtTokenizer.from_words([])(["a cat", "the"], padding=True)
            assert encoded["input_ids"] == source_only["input_ids"]
            assert encoded["labels"] == cove_tokenizer(text_target=targets, padding=True).input_ids

        texts = ["a cat", "the dog\tand more"]
        source_only = CtxCvtTokenizer.train(texts, 40, min_count=1)
        assert source_only.target_words is None
        assert {"and", "more"} < set(source_only.words)
        source_only.save_pretrained(tmp_path / "plain")
        assert "target" not in (tmp_path / "plain" / "tokenizer_config.json").read_text()
        for call in (
            lambda: source_only.decode_target([[4]]),
            lambda: Translation(source_only, max_length=9, seed=0),
        ):
            with pytest.raises(CtxError, match="no target vocabulary"):
                call()
        assert source_only(text_target="a").input_ids == source_only("a").input_ids == tokenizer("a").input_ids

    def test_batches_with_unlabeled_sources(self) -> None:
        tokenizer = CtxCvtTokenizer.train(PAIRS, 40, min_count=1, min_target_count=1)
        encoded = tokenizer(["a cat", "the"], text_target=["eine Katze.", ""])
        features = [
            {"input_ids": ids, "labels": labels}
            for ids, labels in zip(encoded["input_ids"], encoded["labels"], strict=True)
        ]
        for side in ("right", "left"):
            tokenizer.padding_side = side
            collate = UnlabeledCollator(SourceTargetCollator(tokenizer), per_example=True)
            batch = collate([features[0], *mark_unlabeled(features[1:])])
            expected = tokenizer(["a cat", "the"], padding=True, return_tensors="pt")
            assert torch.equal(batch["input_ids"], expected.input_ids)
            assert torch.equal(batch["attention_mask"], expected.attention_mask)
            assert batch["labels"].tolist() == [encoded["labels"][0], [-100] * 4]
            assert batch["views"].tolist() == [-100, 1]


class TestFinetuning:
    SIZES = ("--config_options", "hidden_size=32", "cell_size=32", "target_embedding_size=16")

    @staticmethod
    def flags(tokenizer: Path, tmp_path: Path) -> dict[str, Any]:
        """Flags of a short run with a new model."""
        return {
            "family": f"cvt:tokenizer={tokenizer}",
            "output_dir": tmp_path / "out",
            "predictions_file": tmp_path / "predicted.jsonl",
            "train_file": tmp_path / "pairs.jsonl",
            "validation_file": tmp_path / "pairs.jsonl",
            "max_length": 8,
            "max_target_length": 6,
            "num_beams": 2,
            "metrics": "exact_match",
            "learning_rate": 5e-3,
            "per_device_batch_size": 16,
            "max_steps": 20,
            "logging_steps": 1,
            "eval_steps": 0,
            "save_steps": 0,
        }

    @pytest.fixture(autouse=True)
    def files(self, tmp_path: Path) -> None:
        rows = [
            {"source": f"{first} {second}", "target": f"{WORDS[first]} {WORDS[second]}"}
            for first in WORDS
            for second in WORDS
        ]
        table = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "pairs.jsonl").write_text(table)
        (tmp_path / "more.txt").write_text("".join(row["source"] + " dog\n" for row in rows))
        (tmp_path / "more.jsonl").write_text("".join(json.dumps({"source": row["source"]}) + "\n" for row in rows))
        for column in ("source", "target"):
            (tmp_path / f"{column}.txt").write_text("".join(row[column] + "\n\n" for row in rows))

    @pytest.mark.parametrize("suffix", ["txt", "jsonl"])
    def test_unlabeled_sources(self, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
        """The command line trains the tokenizer and the model with alternating losses; the predictions of the run equal
        the output of the reloaded model."""
        texts = ("--dataset", tmp_path / "source.txt", "--translations", tmp_path / "target.txt")
        options = ("--options", "min_count=1", "min_target_count=1", "--validation_fraction", 0)
        folder = tmp_path / "words"
        code = run_command(
            "data", "tokenizer", "--family", "cvt", *texts, "--vocab_size", 40, "--output_dir", folder, *options
        )
        assert code == 0, capsys.readouterr().err
        flags = self.flags(folder, tmp_path) | {"unlabeled_file": tmp_path / f"more.{suffix}"}
        assert run_command("finetune", "seq2seq", *self.SIZES, **flags) == 0, capsys.readouterr().err
        steps = [row for row in read_log(tmp_path / "out") if "loss" in row]
        assert ["cross_view_loss" in row for row in steps] == [False, True] * 10
        model, tokenizer = (
            AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out"),
            AutoTokenizer.from_pretrained(folder),
        )
        assert type(model) is CASE.model_class
        predicted = [json.loads(line) for line in (tmp_path / "predicted.jsonl").read_text().splitlines()]
        texts = generate_texts(model, tokenizer, [row["source"] for row in predicted], num_beams=2, max_new_tokens=6)
        assert [row["prediction"] for row in predicted] == texts

    def test_finetuning_errors(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        source_only, with_targets = tmp_path / "plain", tmp_path / "both"
        CtxCvtTokenizer.from_words([]).save_pretrained(source_only)
        CtxCoveTokenizer.train(PAIRS, 40, min_count=1, min_target_count=1).save_pretrained(with_targets)
        flags = self.flags(source_only, tmp_path)
        assert run_command("finetune", "seq2seq", *self.SIZES, **flags) == 2
        assert "no target vocabulary" in capsys.readouterr().err
        overrides = {"unlabeled_file": tmp_path / "more.txt", "family": f"cove:tokenizer={with_targets}"}
        assert run_command("finetune", "seq2seq", **flags | overrides) == 2
        assert "no loss for unlabeled examples" in capsys.readouterr().err
        CtxCvtTokenizer.train(PAIRS, 40, min_count=1, min_target_count=1).save_pretrained(with_targets)
        (tmp_path / "wrong.jsonl").write_text('{"text": "a"}\n')
        flags = self.flags(with_targets, tmp_path)
        assert (
            run_command("finetune", "seq2seq", *self.SIZES, **flags | {"unlabeled_file": tmp_path / "wrong.jsonl"}) == 2
        )
        assert "source" in capsys.readouterr().err
        flags |= {"label_smoothing": 0.1}
        assert run_command("finetune", "seq2seq", *self.SIZES, **flags) == 2
        assert "several terms" in capsys.readouterr().err
