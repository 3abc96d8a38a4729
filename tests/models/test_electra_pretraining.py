"""ELECTRA's pair: its losses against transformers' two models, its ties, its halves on disk, its tasks, its errors."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers import ElectraForMaskedLM, ElectraForPreTraining
from zoo import TINY, Batch, Case, assert_close, gradients, make_batch, make_targets, randomised

import hf_ctxmodels
from hf_ctxmodels import CtxElectraConfig, CtxElectraForPreTraining, CtxElectraTokenizer, CtxError
from hf_ctxmodels.registry import FAMILIES

CASE = Case(FAMILIES["electra"], "AutoModelForPreTraining")
SHARED = ("word_embeddings.weight", "position_embeddings.weight", "token_type_embeddings.weight", "norm.weight")
TIES = {
    "embeddings": {"tie_generator": "embeddings", "generator_size": 0.5},
    "none": {"tie_generator": "none", "generator_size": 0.25},
    "all": {"tie_generator": "all", "generator_size": 1.0},
}
TASKS = ("detection", "detection_masked", "replace_mlm", "all_tokens_mlm")


def labelled_batch(**options: Any) -> Batch:
    batch = make_batch(CASE, **options)
    return batch | make_targets(CASE, batch)


def halves(model: CtxElectraForPreTraining, folder: Path) -> tuple[ElectraForMaskedLM, ElectraForPreTraining]:
    """The two models as transformers opens them; no key is missing or unexpected."""
    model.export_generator(folder / "generator")
    model.export_discriminator(folder / "discriminator")
    opened = []
    for kind, name in ((ElectraForMaskedLM, "generator"), (ElectraForPreTraining, "discriminator")):
        half, report = kind.from_pretrained(folder / name, output_loading_info=True)
        assert not any(report.values()), report
        opened.append(half.eval())
    return tuple(opened)


def reference_losses(
    generator: ElectraForMaskedLM, discriminator: ElectraForPreTraining, batch: Batch, corrupted_ids: Tensor
) -> tuple[Tensor, Tensor]:
    inputs = {name: batch[name] for name in ("attention_mask", "token_type_ids", "position_ids") if name in batch}
    mlm_loss = generator(input_ids=batch["input_ids"], labels=batch["labels"], **inputs).loss
    replaced = (corrupted_ids != batch["token_labels"]).long()
    return mlm_loss, discriminator(input_ids=corrupted_ids, labels=replaced, **inputs).loss


class TestLosses:
    @pytest.mark.parametrize("unpad", [True, False])
    @pytest.mark.parametrize("tie", TIES)
    def test_are_those_of_the_two_reference_models(self, tie: str, unpad: bool, tmp_path: Path) -> None:
        """Gradients too, of every parameter: that of a shared one is the sum of its two roles' gradients."""
        model = CASE.model(unpad=unpad, discriminator_weight=50.0, **TIES[tie])
        batch = labelled_batch()
        outputs = model(**batch)
        generator, discriminator = halves(model, tmp_path)
        mlm_loss, rtd_loss = reference_losses(generator, discriminator, batch, outputs.corrupted_ids)
        assert_close(outputs.mlm_loss, mlm_loss.detach())
        assert_close(outputs.rtd_loss, rtd_loss.detach())
        assert_close(outputs.loss, mlm_loss + 50 * rtd_loss)
        (mlm_loss + 50 * rtd_loss).backward()
        outputs.loss.backward()
        for ours, theirs in (
            (model.electra.embeddings.word_embeddings, discriminator.electra.embeddings.word_embeddings),
            (model.generator.electra.embeddings.word_embeddings, generator.electra.embeddings.word_embeddings),
        ):
            expected = theirs.weight.grad
            if tie != "none":
                pairs = (generator.electra.embeddings, discriminator.electra.embeddings)
                expected = sum(half.word_embeddings.weight.grad for half in pairs)
            assert_close(ours.weight.grad, expected, tolerance=1e-4)
        last, theirs = model.electra.layers[-1].feed_forward, discriminator.electra.encoder.layer[-1]
        written = generator.electra.encoder.layer[-1]
        shared = written.intermediate.dense.weight.grad if tie == "all" else 0
        assert_close(last.up_proj.weight.grad, theirs.intermediate.dense.weight.grad + shared, tolerance=1e-4)
        assert_close(model.generator.mlm_head.dense.weight.grad, generator.generator_predictions.dense.weight.grad)

    def test_a_right_draw_counts_as_original(self) -> None:
        """A generator that is sure of the original: nothing is replaced, and nothing is to be found."""
        model = CASE.model()
        batch = labelled_batch()
        words = batch["labels"][batch["labels"] != -100]
        batch["labels"] = batch["labels"].masked_fill(batch["labels"] != -100, int(words[0]))
        batch["token_labels"] = batch["token_labels"].where(batch["labels"] == -100, batch["labels"])
        with torch.no_grad():
            model.generator.mlm_head.decoder.bias[int(words[0])] = 1e4
        outputs = model(**batch)
        tokens = batch["attention_mask"].bool()
        assert torch.equal(outputs.corrupted_ids[tokens], batch["token_labels"][tokens])
        metrics = {name: value.tolist() for name, value in outputs.metrics.items()}
        masked = int((batch["labels"] != -100).sum())
        assert metrics["generator_accuracy"] == metrics["sampled_accuracy"] == [masked, masked]
        assert metrics["rtd_share"] == [0, int(tokens.sum())]
        assert metrics["rtd_recall"] == [0, 0]

    def test_original_ids_follow_from_the_labels(self) -> None:
        """What a collator of masked LM alone gives is enough."""
        batch = labelled_batch()
        model = CASE.model()
        whole = model(**batch)
        del batch["token_labels"]
        assert_close(model(**batch).loss, whole.loss)

    @pytest.mark.parametrize("seeded", [True, False])
    def test_draws_belong_to_the_row(self, seeded: bool) -> None:
        """Whatever the other rows and the padding; and other seeds draw otherwise."""
        model = CASE.model(tie_word_embeddings=False)
        torch.nn.init.zeros_(model.generator.mlm_head.decoder.weight)
        torch.nn.init.zeros_(model.generator.mlm_head.decoder.bias)  # all words are equally likely
        batch = labelled_batch(lengths=(12, 12, 12, 12))
        if seeded:
            batch["sampling_seed"] = torch.tensor([3, 1, 4, 1 << 60])
        together = model(**batch).corrupted_ids
        order = torch.tensor([2, 0])
        some = model(**{name: value[order] for name, value in batch.items()}).corrupted_ids
        assert torch.equal(some, together[order])
        other = model(**batch | {"sampling_seed": torch.tensor([5, 9, 2, 6])}).corrupted_ids
        masked = batch["labels"] != -100
        assert (other != together)[masked].float().mean() > 0.8
        assert torch.equal(other[~masked], together[~masked])

    def test_packed_sequences(self) -> None:
        batch = labelled_batch(lengths=(12, 12))
        apart = {name: value.unflatten(1, (2, 6)).flatten(0, 1) for name, value in batch.items()}
        together = {name: value for name, value in batch.items() if name != "attention_mask"}
        together["sequence_ids"] = torch.tensor([[1] * 6 + [2] * 6] * 2)
        model = CASE.model(generator_size=1.0)
        with torch.no_grad():  # the same draws though the rows differ: one word is certain
            model.generator.mlm_head.decoder.bias[7] = 1e4
        assert_close(model(**together).loss, model(**apart).loss, tolerance=1e-4)


class TestTies:
    @pytest.mark.parametrize("words", [True, False])
    @pytest.mark.parametrize("tie", TIES)
    def test_weights_are_shared_before_and_after_saving(self, tie: str, words: bool, tmp_path: Path) -> None:
        model = CASE.model(tie_word_embeddings=words, **TIES[tie])
        model.save_pretrained(tmp_path)
        again, report = CASE.auto_class.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report.values()), report
        for pair in (model, again):
            writer, reader = dict(pair.generator.electra.named_parameters()), dict(pair.electra.named_parameters())
            shared = {name for name in reader if name in writer and writer[name] is reader[name]}
            expected = {name for name in reader if tie == "all" or name.removeprefix("embeddings.") in SHARED}
            expected |= {"embeddings.norm.bias"}
            assert shared == (set() if tie == "none" else expected)
            tied = pair.generator.mlm_head.decoder.weight is writer["embeddings.word_embeddings.weight"]
            assert tied == words
        for (name, got), wanted in zip(again.state_dict().items(), model.state_dict().values(), strict=True):
            assert torch.equal(got, wanted), name

    @pytest.mark.parametrize("change", [3, -3])
    @pytest.mark.parametrize("tie", TIES)
    def test_resizing_keeps_them(self, tie: str, change: int) -> None:
        model = CASE.model(**TIES[tie])
        size = TINY["vocab_size"] + change
        model.resize_token_embeddings(size)
        batch = {name: value.clamp(max=size - 1) for name, value in labelled_batch().items()}
        model(**batch).loss.backward()
        for half in (model, model.generator):
            assert half.get_input_embeddings().weight.shape[0] == half.config.vocab_size == size
        assert model.generator.mlm_head.decoder.weight is model.generator.get_input_embeddings().weight
        shares = model.generator.get_input_embeddings().weight is model.get_input_embeddings().weight
        assert shares == (tie != "none")


class TestHalves:
    def test_auto_classes_open_the_discriminator(self, tmp_path: Path) -> None:
        """The encoder and every head of a joint checkpoint; only a head is missing, and nothing is unexpected."""
        model = CASE.model()
        model.save_pretrained(tmp_path)
        for auto_name in CASE.family.models:
            opened, report = getattr(transformers, auto_name).from_pretrained(tmp_path, output_loading_info=True)
            encoder = opened.base_model.state_dict()
            for name, weight in model.electra.state_dict().items():
                assert torch.equal(encoder[name], weight), f"{name} by {auto_name}"
            assert not report["unexpected_keys"], auto_name
            assert not [name for name in report["missing_keys"] if name.startswith("electra.")], auto_name

    @pytest.mark.parametrize("tie", TIES)
    def test_exported_and_put_together_again(self, tie: str, tmp_path: Path) -> None:
        """Bit for bit; the ties are found in the weights."""
        model = CASE.model(**TIES[tie])
        halves(model, tmp_path)
        again = CtxElectraForPreTraining.from_pretrained_pair(
            tmp_path / "generator", tmp_path / "discriminator", discriminator_weight=CASE.config().discriminator_weight
        )
        assert again.config.tie_generator == ("none" if tie == "none" else "embeddings")
        assert again.state_dict().keys() == model.state_dict().keys()
        for name, weight in model.state_dict().items():
            assert torch.equal(again.state_dict()[name], weight), name
        batch = labelled_batch()
        assert_close(again(**batch).loss, model(**batch).loss)

    def test_of_two_reference_models_of_any_shape(self, tmp_path: Path) -> None:
        shape = {"vocab_size": 61, "embedding_size": 24, "max_position_embeddings": 40, "num_hidden_layers": 2}
        kinds = {
            "generator": (ElectraForMaskedLM, {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 20}),
            "discriminator": (
                ElectraForPreTraining,
                {"hidden_size": 24, "num_attention_heads": 2, "intermediate_size": 40, "hidden_act": "relu"},
            ),
        }
        references = {}
        for seed, (name, (kind, fields)) in enumerate(kinds.items()):
            reference = randomised(kind(transformers.ElectraConfig(**shape, **fields)), seed).eval()
            reference.save_pretrained(tmp_path / name)
            references[name] = reference
        model = CtxElectraForPreTraining.from_pretrained_pair(tmp_path / "generator", tmp_path / "discriminator")
        assert model.config.tie_generator == "none"
        assert model.config.discriminator_weight == 50
        batch = labelled_batch()
        outputs = model(**batch)
        mlm_loss, rtd_loss = reference_losses(**references, batch=batch, corrupted_ids=outputs.corrupted_ids)
        assert_close(outputs.mlm_loss, mlm_loss.detach())
        assert_close(outputs.rtd_loss, rtd_loss.detach())
        model.save_pretrained(tmp_path / "joint")
        again = CASE.auto_class.from_pretrained(tmp_path / "joint")
        assert_close(again(**batch).loss, outputs.loss)

    def test_of_this_packages_own_checkpoints(self, tmp_path: Path) -> None:
        model = CASE.model()
        model.save_pretrained(tmp_path / "joint")
        model.generator.save_pretrained(tmp_path / "generator")
        pair = CtxElectraForPreTraining.from_pretrained_pair(tmp_path / "generator", tmp_path / "joint")
        for name, weight in model.state_dict().items():
            assert torch.equal(pair.state_dict()[name], weight), name


class TestTwoStages:
    def test_a_discriminator_starts_from_a_frozen_generator(self, tmp_path: Path) -> None:
        generator = Case(CASE.family, "AutoModelForMaskedLM").model()
        generator.save_pretrained(tmp_path / "one")
        model = CtxElectraForPreTraining.from_pretrained_pair(
            tmp_path / "one", tmp_path / "one", tie_generator="none", freeze_generator=True
        )
        assert not any(parameter.requires_grad for parameter in model.generator.parameters())
        model.save_pretrained(tmp_path / "start")
        model = CASE.auto_class.from_pretrained(tmp_path / "start")
        for name, weight in generator.electra.state_dict().items():
            assert torch.equal(model.electra.state_dict()[name], weight)
            assert torch.equal(model.generator.electra.state_dict()[name], weight)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert trained == {name for name, _ in model.named_parameters() if not name.startswith("generator.")}
        outputs = model(**labelled_batch())
        assert_close(outputs.loss, CASE.config().discriminator_weight * outputs.rtd_loss)
        outputs.loss.backward()
        for name, parameter in model.named_parameters():
            assert (parameter.grad is not None) == (name in trained), name


class TestTasks:
    @pytest.mark.parametrize("tie", TIES)
    @pytest.mark.parametrize("task", TASKS)
    def test_reaches_every_parameter_and_survives_saving(self, task: str, tie: str, tmp_path: Path) -> None:
        batch = labelled_batch()
        model = CASE.model(discriminator_task=task, **TIES[tie])
        outputs = model(**batch)
        for name, gradient in gradients(model, outputs.loss).items():
            assert gradient.any(), f"{name} gets no gradient"
        model.save_pretrained(tmp_path)
        again, report = CASE.auto_class.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report.values()), report
        assert_close(again(**batch).loss, outputs.loss)

    @pytest.mark.parametrize("task", TASKS)
    def test_loss(self, task: str, tmp_path: Path) -> None:
        """Against the same model's logits on what it read, by the formulas of the paper's section 3.5."""
        batch = labelled_batch()
        model = CASE.model(discriminator_task=task)
        outputs = model(**batch)
        read, originals = outputs.corrupted_ids, batch["token_labels"]
        inputs = {name: batch[name] for name in ("attention_mask", "token_type_ids")}
        logits = model(input_ids=read, **inputs).logits
        counted = (batch["labels"] if task in ("detection_masked", "replace_mlm") else originals) != -100
        logits, read, originals = logits[counted], read[counted], originals[counted]
        if task.startswith("detection"):
            expected = F.binary_cross_entropy_with_logits(logits, (read != originals).float())
        elif task == "replace_mlm":
            expected = F.cross_entropy(logits, originals)
        else:
            states = model.electra(input_ids=outputs.corrupted_ids, **inputs).last_hidden_state[counted]
            copy = torch.sigmoid(model.copy_gate(states).squeeze(-1))
            chance = logits.softmax(-1).gather(1, originals[:, None])[:, 0]
            expected = -((1 - copy) * chance + copy * (read == originals)).log().mean()
        assert_close(outputs.rtd_loss, expected)

    @pytest.mark.parametrize("task", TASKS)
    def test_accumulation(self, task: str) -> None:
        batch = labelled_batch()
        model = CASE.model(discriminator_task=task)
        counts = {name: (batch[name] != -100).sum() for name in model.loss_targets}
        parts = [{name: value[rows] for name, value in batch.items()} for rows in (slice(0, 1), slice(1, 4))]
        total = sum(model(**part, num_items_in_batch=counts).loss for part in parts)
        assert_close(total, model(**batch).loss)

    @pytest.mark.parametrize("task", ["replace_mlm", "all_tokens_mlm"])
    def test_a_discriminator_over_the_vocabulary_exports_as_a_masked_lm(self, task: str, tmp_path: Path) -> None:
        model = CASE.model(discriminator_task=task)
        model.export_discriminator(tmp_path)
        reference, report = ElectraForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report.values()), report
        batch = make_batch(CASE)
        tokens = batch["attention_mask"].bool()
        assert_close(model(**batch).logits[tokens], reference.eval()(**batch).logits[tokens])


class TestErrors:
    @pytest.mark.parametrize(
        ("fields", "says"),
        [
            ({"generator_size": 1.5}, "exceeds the discriminator's"),
            ({"generator_overrides": {"hidden_size": 64}}, "exceeds the discriminator's"),
            ({"generator_size": 0}, "must be above 0"),
            ({"freeze_generator": True}, "would freeze shared weights"),
            ({"tie_generator": "some"}, "tie_generator"),
            ({"hidden_size": 30}, "not a multiple"),
        ],
    )
    def test_configurations_that_cannot_be(self, fields: dict[str, Any], says: str) -> None:
        with pytest.raises(Exception, match=says):
            CASE.config(**fields)

    @pytest.mark.parametrize(
        ("fields", "says"),
        [
            ({"generator_size": 0.7, "num_attention_heads": 8}, "do not divide"),
            ({"generator_overrides": {"vocab_size": 60}}, "vocabulary of 60 tokens"),
            ({"generator_overrides": {"embedding_size": 8}}, "embedding_size is 8 in"),
            ({"generator_size": 0.5, "tie_generator": "all"}, "hidden_size is 16 in"),
        ],
    )
    def test_pairs_that_cannot_be(self, fields: dict[str, Any], says: str) -> None:
        config = CASE.config(**fields)
        with pytest.raises(CtxError, match=says) as caught:
            CtxElectraForPreTraining(config)
        assert "Fix:" in str(caught.value)

    def test_a_wider_generator_needs_weights_of_its_own(self) -> None:
        assert CASE.model(generator_size=1.5, tie_generator="none")(**labelled_batch()).loss.isfinite()

    def _saved(self, folder: Path, kind: str, **fields: Any) -> Path:
        getattr(hf_ctxmodels, kind)(CASE.config(**fields)).save_pretrained(folder / kind)
        return folder / kind

    @pytest.mark.parametrize(
        ("fields", "options", "says"),
        [
            ({"vocab_size": 50}, {}, "vocabulary of 50 tokens, the discriminator of 61"),
            ({"vocab_size": 50}, {"tie_generator": "none"}, "vocabulary of 50 tokens"),
            ({"hidden_size": 64}, {}, "exceeds the discriminator's"),
            ({}, {"tie_generator": "embeddings"}, "differs between"),
            ({}, {"tie_generator": "half"}, "tie_generator"),
            ({"embedding_size": 8}, {"tie_generator": "embeddings"}, "differs between"),
        ],
    )
    def test_halves_that_do_not_fit(self, fields: dict, options: dict, says: str, tmp_path: Path) -> None:
        generator = self._saved(tmp_path, "CtxElectraForMaskedLM", **fields)
        discriminator = self._saved(tmp_path, "CtxElectraForReplacedTokenDetection")
        with pytest.raises(CtxError, match=says):
            CtxElectraForPreTraining.from_pretrained_pair(generator, discriminator, **options)

    def test_halves_of_different_vocabularies_of_one_size(self, tmp_path: Path) -> None:
        texts = ["a cat sat on a mat", "a dog ran to the house"]
        folders = []
        for kind, text in zip(("CtxElectraForMaskedLM", "CtxElectraForReplacedTokenDetection"), texts, strict=True):
            folders.append(self._saved(tmp_path, kind))
            CtxElectraTokenizer.train([text], vocab_size=61, min_frequency=1).save_pretrained(folders[-1])
        with pytest.raises(CtxError, match=r"The vocabularies differ: .* is token"):
            CtxElectraForPreTraining.from_pretrained_pair(*folders)

    def test_a_discriminator_is_no_generator(self, tmp_path: Path) -> None:
        discriminator = self._saved(tmp_path, "CtxElectraForReplacedTokenDetection")
        with pytest.raises(CtxError, match=r"(?s)it has no mlm_head.*export_generator"):
            CtxElectraForPreTraining.from_pretrained_pair(discriminator, discriminator)

    def test_embeddings_cannot_be_replaced(self) -> None:
        batch = labelled_batch()
        del batch["input_ids"]
        with pytest.raises(CtxError, match="not inputs_embeds"):
            CASE.model()(inputs_embeds=torch.zeros(4, 12, TINY["embedding_size"]), **batch)

    def test_seeds_of_another_batch(self) -> None:
        with pytest.raises(CtxError, match=r"sampling_seed is \(3,\), expected \(4,\)"):
            CASE.model()(**labelled_batch(), sampling_seed=torch.zeros(3, dtype=torch.long))

    def test_a_reference_decoder_is_refused(self, tmp_path: Path) -> None:
        transformers.ElectraConfig(is_decoder=True).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="is_decoder=True"):
            CtxElectraConfig.from_pretrained(tmp_path)
