"""ELECTRA: joint pretraining of generator and discriminator, and losses of replaced token detection."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from torch.nn import functional as F
from transformers import ElectraForMaskedLM, ElectraForPreTraining
from zoo import (
    TINY,
    Batch,
    Case,
    assert_close,
    assert_nonzero_gradients,
    assert_same_outputs,
    assert_same_weights,
    gradients,
    load_strict,
    make_batch,
    make_targets,
)

import hf_ctxmodels
from hf_ctxmodels import CtxElectraConfig, CtxElectraForPreTraining, CtxElectraTokenizer, CtxError
from hf_ctxmodels.layers.lm_loss import cross_entropy as prediction
from hf_ctxmodels.layers.lm_loss.cross_entropy import MaskedLMHead
from hf_ctxmodels.layers.lm_loss.sampling import sample_categorical, uniforms
from hf_ctxmodels.models.electra import replaced_token_detection as replaced_token
from hf_ctxmodels.models.electra.replaced_token_detection import (
    copy_or_predict_loss,
    detection_counts,
    detection_loss,
    fill_masked,
)
from hf_ctxmodels.registry import FAMILIES

CASE = Case(FAMILIES["electra"], "AutoModelForPreTraining")
SHARED = ("word_embeddings.weight", "position_embeddings.weight", "token_type_embeddings.weight", "norm.weight")
TIES = {
    "embeddings": {"tie_generator": "embeddings", "generator_size": 0.5},
    "none": {"tie_generator": "none", "generator_size": 0.25},
    "all": {"tie_generator": "all", "generator_size": 1.0},
}
TASKS = ("detection", "detection_masked", "replace_mlm", "all_tokens_mlm")


def labeled_batch(**options: Any) -> Batch:
    batch = make_batch(CASE, **options)
    return batch | make_targets(CASE, batch)


def export_pair(model: CtxElectraForPreTraining, folder: Path) -> tuple[ElectraForMaskedLM, ElectraForPreTraining]:
    """Generator and discriminator, exported and loaded with transformers."""
    model.export_generator(folder / "generator")
    model.export_discriminator(folder / "discriminator")
    classes = {"generator": ElectraForMaskedLM, "discriminator": ElectraForPreTraining}
    return tuple(load_strict(model_class, folder / name) for name, model_class in classes.items())


def reference_losses(
    generator: ElectraForMaskedLM, discriminator: ElectraForPreTraining, batch: Batch, corrupted_ids: Tensor
) -> tuple[Tensor, Tensor]:
    inputs = {name: batch[name] for name in ("attention_mask", "token_type_ids", "position_ids") if name in batch}
    mlm_loss = generator(input_ids=batch["input_ids"], labels=batch["labels"], **inputs).loss
    replaced = (corrupted_ids != batch["token_labels"]).long()
    return mlm_loss, discriminator(input_ids=corrupted_ids, labels=replaced, **inputs).loss


def assert_accumulates_and_reloads(
    model: Any, batch: dict[str, torch.Tensor], loss: torch.Tensor, folder: Path
) -> None:
    """The loss is the sum of the losses of two micro-batches, trains every parameter, and is the same after saving."""
    counts = {name: (batch[name] != -100).sum() for name in model.loss_targets}
    microbatches = [{name: value[rows] for name, value in batch.items()} for rows in (slice(0, 1), slice(1, 4))]
    assert_close(sum(model(**microbatch, num_items_in_batch=counts).loss for microbatch in microbatches), loss)
    assert_nonzero_gradients(model, gradients(model, loss))
    model.save_pretrained(folder)
    assert_close(load_strict(CASE.auto_class, folder)(**batch).loss, loss)


class TestLosses:
    @pytest.mark.parametrize("unpad", [True, False])
    @pytest.mark.parametrize("tie", TIES)
    def test_losses_and_gradients_match_transformers(self, tie: str, unpad: bool, tmp_path: Path) -> None:
        """The gradient of a shared weight is the sum of its gradients in both models."""
        model = CASE.model(unpad=unpad, discriminator_weight=50.0, **TIES[tie])
        batch = labeled_batch()
        outputs = model(**batch)
        generator, discriminator = export_pair(model, tmp_path)
        mlm_loss, rtd_loss = reference_losses(generator, discriminator, batch, outputs.corrupted_ids)
        assert_close(outputs.mlm_loss, mlm_loss.detach())
        assert_close(outputs.rtd_loss, rtd_loss.detach())
        assert_close(outputs.loss, mlm_loss + 50 * rtd_loss)
        (mlm_loss + 50 * rtd_loss).backward()
        outputs.loss.backward()
        references = (generator.electra, discriminator.electra)
        expected = [reference.embeddings.word_embeddings.weight.grad for reference in references]
        expected = expected if tie == "none" else [sum(expected)] * 2
        encoders = (model.generator.electra, model.electra)
        actual = [encoder.embeddings.word_embeddings.weight.grad for encoder in encoders]
        assert_close(actual, expected, tolerance=1e-4)
        expected = [reference.encoder.layer[-1].intermediate.dense.weight.grad for reference in references]
        expected = sum(expected) if tie == "all" else expected[1]
        assert_close(model.electra.layers[-1].feed_forward.up_proj.weight.grad, expected, tolerance=1e-4)
        assert_close(model.generator.mlm_head.dense.weight.grad, generator.generator_predictions.dense.weight.grad)
        del batch["token_labels"]  # by default derived from the labels
        assert_close(model(**batch).loss, outputs.loss)

    def test_correct_samples_count_as_original(self) -> None:
        """With a generator that always samples the original token."""
        model = CASE.model()
        batch = labeled_batch()
        token = int(batch["labels"][batch["labels"] != -100][0])
        batch["labels"] = batch["labels"].masked_fill(batch["labels"] != -100, token)
        batch["token_labels"] = batch["token_labels"].where(batch["labels"] == -100, batch["labels"])
        with torch.no_grad():
            model.generator.mlm_head.decoder.bias[token] = 1e4
        outputs = model(**batch)
        token_mask = batch["attention_mask"].bool()
        assert torch.equal(outputs.corrupted_ids[token_mask], batch["token_labels"][token_mask])
        metrics = {name: value.tolist() for name, value in outputs.metrics.items()}
        masked = int((batch["labels"] != -100).sum())
        assert metrics["generator_accuracy"] == metrics["sampled_accuracy"] == [masked, masked]
        assert metrics["rtd_share"] == [0, int(token_mask.sum())]
        assert metrics["rtd_recall"] == [0, 0]

    @pytest.mark.parametrize("seeded", [True, False])
    def test_samples_depend_only_on_example_and_seed(self, seeded: bool) -> None:
        """Not on other examples or padding."""
        model = CASE.model(tie_word_embeddings=False)
        torch.nn.init.zeros_(model.generator.mlm_head.decoder.weight)
        torch.nn.init.zeros_(model.generator.mlm_head.decoder.bias)  # a uniform distribution
        batch = labeled_batch(lengths=(12, 12, 12, 12))
        seeds = {"sampling_seed": torch.tensor([3, 1, 4, 1 << 60])} if seeded else {}
        corrupted_ids = model(**batch, **seeds).corrupted_ids
        order = torch.tensor([2, 0])
        reordered = model(**{name: value[order] for name, value in (batch | seeds).items()}).corrupted_ids
        assert torch.equal(reordered, corrupted_ids[order])
        padded = {name: F.pad(value, (4, 3), value=-100 * ("labels" in name)) for name, value in batch.items()}
        padded_ids = model(**padded, **seeds).corrupted_ids
        assert torch.equal(padded_ids[:, 4:-3], corrupted_ids)
        assert not padded_ids[:, :4].any()
        reseeded = model(**batch, sampling_seed=torch.tensor([5, 9, 2, 6])).corrupted_ids
        masked = batch["labels"] != -100
        assert (reseeded != corrupted_ids)[masked].float().mean() > 0.8
        assert torch.equal(reseeded[~masked], corrupted_ids[~masked])

    def test_packed_sequences(self) -> None:
        batch = labeled_batch(lengths=(12, 12))
        separate = {name: value.unflatten(1, (2, 6)).flatten(0, 1) for name, value in batch.items()}
        packed = {name: value for name, value in batch.items() if name != "attention_mask"}
        packed["sequence_ids"] = torch.tensor([[1] * 6 + [2] * 6] * 2)
        model = CASE.model(generator_size=1.0)
        with torch.no_grad():  # the same samples for both: one token has probability 1
            model.generator.mlm_head.decoder.bias[7] = 1e4
        assert_close(model(**packed).loss, model(**separate).loss, tolerance=1e-4)


class TestTiedWeights:
    @pytest.mark.parametrize("tie_word_embeddings", [True, False])
    @pytest.mark.parametrize("tie", TIES)
    def test_tied_weights_before_and_after_saving(self, tie: str, tie_word_embeddings: bool, tmp_path: Path) -> None:
        model = CASE.model(tie_word_embeddings=tie_word_embeddings, **TIES[tie])
        model.save_pretrained(tmp_path)
        reloaded = load_strict(CASE.auto_class, tmp_path)
        for joint_model in (model, reloaded):
            generator = dict(joint_model.generator.electra.named_parameters())
            discriminator = dict(joint_model.electra.named_parameters())
            shared = {name for name in discriminator if generator.get(name) is discriminator[name]}
            expected = {name for name in discriminator if tie == "all" or name.removeprefix("embeddings.") in SHARED}
            expected |= {"embeddings.norm.bias"}
            assert shared == (set() if tie == "none" else expected)
            is_tied = joint_model.generator.mlm_head.decoder.weight is generator["embeddings.word_embeddings.weight"]
            assert is_tied == tie_word_embeddings
        assert_same_weights(reloaded, model)

    def test_model_without_segments(self, tmp_path: Path) -> None:
        model = CASE.model(type_vocab_size=0)
        model.save_pretrained(tmp_path)
        assert_same_weights(load_strict(CASE.auto_class, tmp_path), model)
        embeddings = model.generator.electra.embeddings
        assert embeddings.position_embeddings.weight is model.electra.embeddings.position_embeddings.weight

    @pytest.mark.parametrize("change", [3, -3])
    @pytest.mark.parametrize("tie", TIES)
    def test_resizing_preserves_tied_weights(self, tie: str, change: int) -> None:
        model = CASE.model(**TIES[tie])
        size = TINY["vocab_size"] + change
        model.resize_token_embeddings(size)
        batch = {name: value.clamp(max=size - 1) for name, value in labeled_batch().items()}
        model(**batch).loss.backward()
        for submodel in (model, model.generator):
            assert submodel.get_input_embeddings().weight.shape[0] == submodel.config.vocab_size == size
        assert model.generator.mlm_head.decoder.weight is model.generator.get_input_embeddings().weight
        is_shared = model.generator.get_input_embeddings().weight is model.get_input_embeddings().weight
        assert is_shared == (tie != "none")


class TestCheckpoints:
    def test_auto_classes_load_discriminator(self, tmp_path: Path) -> None:
        """From a joint checkpoint only weights of heads are missing, and no key is unexpected."""
        model = CASE.model()
        model.save_pretrained(tmp_path)
        for auto_name in CASE.family.models:
            loaded, report = getattr(transformers, auto_name).from_pretrained(tmp_path, output_loading_info=True)
            encoder = loaded.base_model.state_dict()
            for name, weight in model.electra.state_dict().items():
                assert torch.equal(encoder[name], weight), f"{name} by {auto_name}"
            assert not report["unexpected_keys"], auto_name
            assert not [name for name in report["missing_keys"] if name.startswith("electra.")], auto_name

    @pytest.mark.parametrize("tie", TIES)
    def test_export_and_from_pretrained_pair(self, tie: str, tmp_path: Path) -> None:
        """Bit-exact, also for native checkpoints; the tied weights are recognized."""
        model, batch = CASE.model(**TIES[tie]), labeled_batch()
        export_pair(model, tmp_path)
        model.save_pretrained(tmp_path / "joint")
        model.generator.save_pretrained(tmp_path / "native_generator")
        for names in (("generator", "discriminator"), ("native_generator", "joint")):
            reloaded = CtxElectraForPreTraining.from_pretrained_pair(
                *(tmp_path / name for name in names), discriminator_weight=CASE.config().discriminator_weight
            )
            assert reloaded.config.tie_generator == ("none" if tie == "none" else "embeddings")
            assert_same_weights(reloaded, model)
            assert_close(reloaded(**batch).loss, model(**batch).loss)


class TestTwoStages:
    def test_discriminator_initialized_from_frozen_generator(self, tmp_path: Path) -> None:
        generator = Case(CASE.family, "AutoModelForMaskedLM").model()
        generator.save_pretrained(tmp_path / "generator")
        model = CtxElectraForPreTraining.from_pretrained_pair(
            tmp_path / "generator", tmp_path / "generator", tie_generator="none", freeze_generator=True
        )
        assert not any(parameter.requires_grad for parameter in model.generator.parameters())
        model.save_pretrained(tmp_path / "joint")
        model = CASE.auto_class.from_pretrained(tmp_path / "joint")
        for name, weight in generator.electra.state_dict().items():
            assert torch.equal(model.electra.state_dict()[name], weight)
            assert torch.equal(model.generator.electra.state_dict()[name], weight)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert trained == {name for name, _ in model.named_parameters() if not name.startswith("generator.")}
        outputs = model(**labeled_batch())
        assert_close(outputs.loss, CASE.config().discriminator_weight * outputs.rtd_loss)
        outputs.loss.backward()
        for name, parameter in model.named_parameters():
            assert (parameter.grad is not None) == (name in trained), name


class TestTasks:
    @pytest.mark.parametrize("tie", TIES)
    @pytest.mark.parametrize("task", TASKS)
    def test_task_losses_accumulation_and_saving(self, task: str, tie: str, tmp_path: Path) -> None:
        """Losses by the formulas of section 3.5 of the paper, with the model's logits on the corrupted input."""
        batch = labeled_batch()
        model = CASE.model(discriminator_task=task, **TIES[tie])
        outputs = model(**batch)
        corrupted, original = outputs.corrupted_ids, batch["token_labels"]
        inputs = {name: batch[name] for name in ("attention_mask", "token_type_ids")}
        logits = model(input_ids=corrupted, **inputs).logits
        is_target = (batch["labels"] if task in ("detection_masked", "replace_mlm") else original) != -100
        logits, corrupted, original = logits[is_target], corrupted[is_target], original[is_target]
        if task.startswith("detection"):
            expected = F.binary_cross_entropy_with_logits(logits, (corrupted != original).float())
        elif task == "replace_mlm":
            expected = F.cross_entropy(logits, original)
        else:
            states = model.electra(input_ids=outputs.corrupted_ids, **inputs).last_hidden_state[is_target]
            copy_prob = torch.sigmoid(model.copy_gate(states).squeeze(-1))
            token_prob = logits.softmax(-1).gather(1, original[:, None])[:, 0]
            expected = -((1 - copy_prob) * token_prob + copy_prob * (corrupted == original)).log().mean()
        assert_close(outputs.rtd_loss, expected)
        assert_accumulates_and_reloads(model, batch, outputs.loss, tmp_path)

    @pytest.mark.parametrize("task", ["replace_mlm", "all_tokens_mlm"])
    def test_vocabulary_tasks_export_as_masked_lm(self, task: str, tmp_path: Path) -> None:
        model = CASE.model(discriminator_task=task)
        model.export_discriminator(tmp_path)
        reference, batch = load_strict(ElectraForMaskedLM, tmp_path), make_batch(CASE)
        assert_same_outputs(model(**batch), reference(**batch), batch["attention_mask"])


class TestAdversarialGenerator:
    """Appendix F of the paper."""

    @pytest.mark.parametrize("task", ["detection", "detection_masked"])
    @pytest.mark.parametrize("tie", TIES)
    def test_loss_and_gradients_match_formulas(self, tie: str, task: str) -> None:
        batch = labeled_batch()
        fields = {"discriminator_task": task, "discriminator_weight": 3.0, **TIES[tie]}
        model = CASE.model(generator_task="adversarial", **fields)
        outputs = model(**batch)
        inputs = {name: batch[name] for name in ("attention_mask", "token_type_ids")}
        masked = batch["labels"] != -100
        samples, original = outputs.corrupted_ids[masked], batch["labels"][masked]
        states = model.generator.electra(input_ids=batch["input_ids"], **inputs).last_hidden_state[masked]
        log_probabilities = model.generator.mlm_head(states).log_softmax(-1).gather(1, samples[:, None])[:, 0]
        logits = model(input_ids=outputs.corrupted_ids, **inputs).logits
        with torch.no_grad():
            is_original = torch.sigmoid(-logits[masked])  # the paper's D
            rewards = -torch.where(samples == original, is_original, 1 - is_original).log()
            baseline = -torch.sigmoid(model.reward_baseline(states)).log().squeeze(-1)
        policy_loss = -(log_probabilities * (rewards - baseline)).mean()
        predicted = torch.sigmoid(model.reward_baseline(states.detach())).squeeze(-1)
        target = (-rewards).exp()
        baseline_loss = -(target * predicted.log() + (1 - target) * (1 - predicted).log()).mean()
        is_target = masked if task == "detection_masked" else batch["token_labels"] != -100
        replaced = (outputs.corrupted_ids != batch["token_labels"])[is_target].float()
        rtd_loss = F.binary_cross_entropy_with_logits(logits[is_target], replaced)
        expected = policy_loss + baseline_loss + 3 * rtd_loss
        assert_close(outputs.loss, expected)
        assert_close(gradients(model, outputs.loss), gradients(model, expected), tolerance=1e-4)
        assert_close(outputs.metrics["generator_reward"], torch.stack([rewards.sum(), masked.sum()]))
        mle_model = CASE.model(**fields)
        mle_model.load_state_dict(model.state_dict(), strict=False)
        assert_close(outputs.mlm_loss, mle_model(**batch).mlm_loss)

    def test_accumulation_and_saving(self, tmp_path: Path) -> None:
        batch = labeled_batch()
        model = CASE.model(generator_task="adversarial")
        outputs = model(**batch)
        assert_accumulates_and_reloads(model, batch, outputs.loss, tmp_path)
        load_strict(Case(CASE.family, "AutoModel").auto_class, tmp_path)

    def test_generator_reward_increases(self) -> None:
        """With a fixed discriminator, the mean reward of the samples increases."""
        torch.manual_seed(0)
        model = CASE.model(generator_task="adversarial", tie_generator="none", discriminator_weight=0.0)
        with torch.no_grad():
            model.rtd_head.out_proj.weight.mul_(30)  # so that detection depends on the token
        batch = labeled_batch()
        masked = batch["labels"] != -100
        generator = [*model.generator.parameters(), *model.reward_baseline.parameters()]
        optimizer = torch.optim.Adam(generator, lr=1e-2)
        rewards = []
        for step in range(80):
            outputs = model(**batch, sampling_seed=torch.arange(4) + 4 * step)
            optimizer.zero_grad()
            outputs.loss.backward()
            optimizer.step()
            total, count = outputs.metrics["generator_reward"].tolist()
            assert count == int(masked.sum())
            rewards.append(total / count)
        assert sum(rewards[-10:]) > 1.1 * sum(rewards[:10]), rewards

    @pytest.mark.parametrize(
        "fields", [{"discriminator_task": "replace_mlm"}, {"freeze_generator": True, "tie_generator": "none"}]
    )
    def test_invalid_combinations(self, fields: dict[str, Any]) -> None:
        with pytest.raises(StrictDataclassError, match="rewards a trained generator"):
            CASE.config(generator_task="adversarial", **fields)


class TestErrors:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"generator_size": 1.5}, "exceeds the discriminator's"),
            ({"generator_overrides": {"hidden_size": 64}}, "exceeds the discriminator's"),
            ({"generator_size": 0}, "must be above 0"),
            ({"freeze_generator": True}, "would freeze shared weights"),
            ({"tie_generator": "some"}, "tie_generator"),
            ({"hidden_size": 30}, "not a multiple"),
            ({"generator_size": 0.7, "num_attention_heads": 8}, "do not divide"),
            ({"generator_overrides": {"vocab_size": 60}}, "vocabulary of 60 tokens"),
            ({"generator_overrides": {"embedding_size": 8}}, "embedding_size is 8 in"),
            ({"generator_size": 0.5, "tie_generator": "all"}, "hidden_size is 16 in"),
        ],
    )
    def test_invalid_configurations(self, fields: dict[str, Any], message: str) -> None:
        """The first six raise when the configuration is created, the others when the generator is."""
        with pytest.raises((CtxError, StrictDataclassError), match=message):
            CtxElectraForPreTraining(CASE.config(**fields))

    def test_wider_generator_without_tied_weights(self) -> None:
        model = CASE.model(generator_size=1.5, tie_generator="none")
        assert model.generator.config.hidden_size == 1.5 * model.config.hidden_size
        assert_nonzero_gradients(model, gradients(model, model(**labeled_batch()).loss))

    def _save(self, folder: Path, class_name: str, **fields: Any) -> Path:
        getattr(hf_ctxmodels, class_name)(CASE.config(**fields)).save_pretrained(folder / class_name)
        return folder / class_name

    @pytest.mark.parametrize(
        ("fields", "options", "message"),
        [
            ({"vocab_size": 50}, {}, "vocabulary of 50 tokens, the discriminator of 61"),
            ({"vocab_size": 50}, {"tie_generator": "none"}, "vocabulary of 50 tokens"),
            ({"hidden_size": 64}, {}, "exceeds the discriminator's"),
            ({}, {"tie_generator": "embeddings"}, "differs between"),
            ({}, {"tie_generator": "half"}, "tie_generator"),
            ({"embedding_size": 8}, {"tie_generator": "embeddings"}, "differs between"),
        ],
    )
    def test_mismatched_checkpoints(self, fields: dict, options: dict, message: str, tmp_path: Path) -> None:
        generator = self._save(tmp_path, "CtxElectraForMaskedLM", **fields)
        discriminator = self._save(tmp_path, "CtxElectraForReplacedTokenDetection")
        with pytest.raises(CtxError, match=message):
            CtxElectraForPreTraining.from_pretrained_pair(generator, discriminator, **options)

    def test_different_vocabularies_of_equal_size(self, tmp_path: Path) -> None:
        texts = {"CtxElectraForMaskedLM": "a cat sat", "CtxElectraForReplacedTokenDetection": "a dog ran"}
        folders = [self._save(tmp_path, class_name) for class_name in texts]
        for folder, text in zip(folders, texts.values(), strict=True):
            CtxElectraTokenizer.train([text], vocab_size=61, min_frequency=1).save_pretrained(folder)
        with pytest.raises(CtxError, match="vocabularies differ"):
            CtxElectraForPreTraining.from_pretrained_pair(*folders)

    def test_discriminator_as_generator_raises(self, tmp_path: Path) -> None:
        discriminator = self._save(tmp_path, "CtxElectraForReplacedTokenDetection")
        with pytest.raises(CtxError, match=r"(?s)it has no mlm_head.*export_generator"):
            CtxElectraForPreTraining.from_pretrained_pair(discriminator, discriminator)

    def test_invalid_inputs(self) -> None:
        model, batch = CASE.model(), labeled_batch()
        with pytest.raises(CtxError, match=r"sampling_seed is \(3,\), expected \(4,\)"):
            model(**batch, sampling_seed=torch.zeros(3, dtype=torch.long))
        del batch["input_ids"]
        with pytest.raises(CtxError, match="input_ids"):
            model(inputs_embeds=torch.zeros(4, 12, TINY["embedding_size"]), **batch)

    def test_decoder_configuration_raises(self, tmp_path: Path) -> None:
        transformers.ElectraConfig(is_decoder=True).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="is_decoder=True"):
            CtxElectraConfig.from_pretrained(tmp_path)


WIDTH, VOCAB_SIZE = 8, 40


@pytest.fixture
def head() -> MaskedLMHead:
    torch.manual_seed(0)
    head = MaskedLMHead(WIDTH, WIDTH, VOCAB_SIZE, activation="gelu", layer_norm_eps=1e-5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter))
    return head


@pytest.mark.parametrize("chunk_size", [1, 2, 100])
def test_generator_samples_and_loss(head: MaskedLMHead, monkeypatch: pytest.MonkeyPatch, chunk_size: int) -> None:
    """In chunks of any size, loss, samples and accuracy equal those computed from all logits."""
    monkeypatch.setattr(prediction, "CHUNK_ELEMENTS", chunk_size * VOCAB_SIZE)
    generator = torch.Generator().manual_seed(1)
    original_ids = torch.randint(VOCAB_SIZE, (3, 6), generator=generator)
    masked = torch.tensor([[0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 1]]).bool()
    labels, states = original_ids.masked_fill(~masked, -100), torch.randn(5, WIDTH, generator=generator)
    filled = fill_masked(states, head, original_ids.masked_fill(masked, 3), labels, torch.tensor([11, 12, 13]))
    logits, targets = head(states), original_ids[masked]
    expected_loss = F.cross_entropy(logits, targets, reduction="sum")
    assert_close(filled.loss, expected_loss)
    random_numbers = uniforms(torch.tensor([11, 11, 11, 13, 13]), torch.tensor([0, 1, 2, 0, 1]))
    assert torch.equal(filled.input_ids[masked], sample_categorical(logits.softmax(-1), random_numbers))
    assert torch.equal(filled.input_ids[~masked], original_ids[~masked])
    assert filled.correct == (logits.argmax(-1) == targets).sum()
    assert_close(*(torch.autograd.grad(loss, list(head.parameters())) for loss in (filled.loss, expected_loss)))


def test_derived_seeds_differ() -> None:
    """Seeds depend on the masked token, its rank among the masked tokens, and the input token at its position."""
    labels = torch.tensor([[5, 6, -100], [6, 5, -100], [5, 7, -100], [5, 6, -100]])
    input_ids = torch.tensor([[3, 3, 9], [3, 3, 9], [3, 3, 9], [3, 6, 9]])
    seeds = replaced_token._derive_seeds(input_ids, labels, (labels != -100).cumsum(1) - 1)
    assert len(seeds.unique()) == 4


def test_detection_loss_and_counts() -> None:
    logits = torch.tensor([2.0, 1.0, -1.0, -2.0, 3.0])
    replaced = torch.tensor([True, False, True, False, True])
    counts = {name: value.tolist() for name, value in detection_counts(logits, replaced).items()}
    assert counts == {"precision": [2, 3], "recall": [2, 3], "f1": [4, 6], "share": [3, 5]}
    expected = -sum(torch.log(torch.sigmoid(x if y else -x)) for x, y in zip(logits, replaced))
    torch.testing.assert_close(detection_loss(logits, replaced), expected)


@pytest.mark.parametrize("chunk_size", [1, 3, 100])
def test_copy_or_predict_loss(head: MaskedLMHead, monkeypatch: pytest.MonkeyPatch, chunk_size: int) -> None:
    """Loss and gradients in chunks of any size."""
    monkeypatch.setattr(prediction, "CHUNK_ELEMENTS", chunk_size * VOCAB_SIZE)
    generator = torch.Generator().manual_seed(2)
    states = torch.randn(7, WIDTH, generator=generator).requires_grad_()
    gate = torch.randn(7, generator=generator).requires_grad_()
    original = torch.randint(VOCAB_SIZE, (7,), generator=generator)
    corrupted = torch.where(torch.arange(7) < 4, original, (original + 1) % VOCAB_SIZE)
    copy_prob = torch.sigmoid(gate)
    token_prob = head(states).softmax(-1)[torch.arange(7), original]
    expected = -((1 - copy_prob) * token_prob + copy_prob * (corrupted == original)).log().sum()
    loss = copy_or_predict_loss(head, gate, states, corrupted, original)
    assert_close(loss, expected)
    leaves = [states, gate, *head.parameters()]
    assert_close(*(torch.autograd.grad(value, leaves) for value in (loss, expected)), "gradients", 1e-4)
