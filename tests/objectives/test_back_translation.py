"""Unsupervised translation: noise, back-translation loss, weight schedules and training runs."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import command_output, run_command, save
from safetensors.torch import load_file
from zoo import tiny_config

from hf_ctxmodels import CtxBertTokenizer, CtxEncoderDecoderConfig, CtxEncoderDecoderForConditionalGeneration, CtxError
from hf_ctxmodels.data import ExampleSet
from hf_ctxmodels.downstream.finetuning.forgetting import PretrainingEvaluation
from hf_ctxmodels.objectives import BackTranslation
from hf_ctxmodels.objectives.back_translation import parse_weight_schedule, scheduled_weight, translate
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.training_log import read_log

ENGLISH = ["a red cat sees one dog", "one big dog sees a cat", "the old dog sat", "a cat and a dog ran", "one sees two"]
GERMAN = ["ein hund sieht die katze", "der alte hund schlief", "eine rote katze lief", "zwei sehen den hund", "ein tag"]
TEXTS = [*(f"<en> {text}" for text in ENGLISH), *(f"<de> {text}" for text in GERMAN)]
LANGUAGES = {"de": 0, "en": 1}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return FAMILIES["mass"].tokenizer.train(TEXTS * 3, 70)


def make_model(family: str, tokenizer: Any, std: float = 0.3) -> Any:
    """A tiny MASS, or an encoder-decoder of two XLM models, without dropout."""
    fields = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "n_langs": 2}
    fields |= {"lang2id": LANGUAGES, "max_position_embeddings": 40, "initializer_range": std}
    fields |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    if family == "mass":
        fields |= {"decoder_start_token_id": tokenizer.eos_token_id}
        model_class = FAMILIES["mass"].models["AutoModelForSeq2SeqLM"]
        return model_class(tiny_config(FAMILIES["mass"], **fields))
    encoder, decoder = (tiny_config(FAMILIES["xlm"], **fields, causal=causal) for causal in (False, True))
    token_ids = {"decoder_start_token_id": tokenizer.eos_token_id}
    return CtxEncoderDecoderForConditionalGeneration(
        CtxEncoderDecoderConfig(encoder=encoder, decoder=decoder, **token_ids)
    )


def make_features(objective: BackTranslation, epoch: int = 0) -> list[dict[str, Any]]:
    examples = ExampleSet.build(objective.examples([[text] for text in TEXTS]))
    return [{**examples[index], "epoch": epoch, "example_index": index} for index in range(len(examples))]


class TestNoise:
    def words(self, tokenizer: Any, ids: np.ndarray) -> list[str]:
        """The words of a sentence; a mask token is one word."""
        text = "".join(tokenizer.convert_ids_to_tokens([int(number) for number in ids[1:-1]]))
        return text.replace(tokenizer.mask_token, "_</w>").removesuffix("</w>").split("</w>")

    def test_no_noise(self, tokenizer: Any) -> None:
        objective = BackTranslation(tokenizer, max_length=30, word_shuffle=0, word_dropout=0, word_blank=0)
        features = make_features(objective)
        assert len(features) == len(TEXTS)
        for feature in features:
            ids = feature["input_ids"]
            assert np.array_equal(objective.add_noise(ids, np.random.default_rng(0)), ids)

    def test_word_shuffle_is_local(self, tokenizer: Any) -> None:
        """Words move by at most two positions, and their subwords stay together."""
        objective = BackTranslation(tokenizer, max_length=30, word_dropout=0, word_blank=0)
        sentence = make_features(objective)[0]["input_ids"]
        words = self.words(tokenizer, sentence)
        assert len(sentence) > len(words) + 2, "no word has several subwords"
        moves = set()
        for seed in range(200):
            noised = objective.add_noise(sentence, np.random.default_rng(seed))
            assert noised[0] == sentence[0]
            assert noised[-1] == sentence[-1]
            shuffled = self.words(tokenizer, noised)
            assert sorted(shuffled) == sorted(words)
            moves |= {shuffled.index(word) - words.index(word) for word in set(words) if words.count(word) == 1}
        assert moves == {-2, -1, 0, 1, 2}

    @pytest.mark.parametrize(("option", "disabled"), [("word_dropout", "word_blank"), ("word_blank", "word_dropout")])
    def test_noise_rates(self, tokenizer: Any, option: str, disabled: str) -> None:
        options = {option: 0.3, disabled: 0.0, "word_shuffle": 0.0}
        objective = BackTranslation(tokenizer, max_length=30, **options)
        sentence = make_features(objective)[0]["input_ids"]
        num_words, num_changed = len(self.words(tokenizer, sentence)), 0
        for seed in range(300):
            noised = objective.add_noise(sentence, np.random.default_rng(seed))
            if option == "word_dropout":
                num_changed += num_words - len(self.words(tokenizer, noised))
            else:
                assert len(noised) == len(sentence)
                is_mask = noised == tokenizer.mask_token_id
                assert np.array_equal(noised[~is_mask], sentence[~is_mask])
                ends = objective.ends_word[sentence]
                num_changed += int((is_mask & ends).sum())
        assert 0.26 < num_changed / (300 * num_words) < 0.34

    def test_word_dropout_keeps_one_word(self, tokenizer: Any) -> None:
        objective = BackTranslation(tokenizer, max_length=30, word_dropout=1.0)
        sentence = make_features(objective)[0]["input_ids"]
        assert len(self.words(tokenizer, objective.add_noise(sentence, np.random.default_rng(0)))) == 1


def test_denoising_targets_and_languages(tokenizer: Any) -> None:
    objective = BackTranslation(tokenizer, max_length=30, seed=3)
    features = make_features(objective)
    batch = objective.collate(features)
    for row, feature in enumerate(features):
        labels = batch["labels"][row]
        assert labels[labels != -100].tolist() == feature["input_ids"][1:].tolist()
        sentence = batch["sentence_ids"][row][batch["sentence_mask"][row] == 1]
        assert sentence.tolist() == feature["input_ids"].tolist()
        language = LANGUAGES["en" if row < len(ENGLISH) else "de"]
        assert batch["langs"][row].unique().tolist() == batch["decoder_langs"][row].unique().tolist() == [language]
        assert batch["other_langs"][row] == 1 - language
    repeated, next_epoch = objective.collate(features), objective.collate(make_features(objective, epoch=1))
    assert all(torch.equal(value, repeated[name]) for name, value in batch.items())
    assert not torch.equal(batch["input_ids"], next_epoch["input_ids"])


@pytest.mark.parametrize("family", ["mass", "xlm"])
class TestLoss:
    def test_loss_matches_reference_loop(self, tokenizer: Any, family: str) -> None:
        """The reference translates each sentence separately; the sentence is the target of its translation."""
        options = {"lambda_ae": "0:1,10:0.5", "lambda_bt": "2"}
        objective = BackTranslation(tokenizer, max_length=30, **options)
        model, features = make_model(family, tokenizer).train(), make_features(objective)
        batch = objective.collate(features)
        objective.loss_function.step = 5
        output = objective.loss_function(model, batch)
        totals, count = {"denoising_loss": 0.0, "back_translation_loss": 0.0}, int((batch["labels"] != -100).sum())
        for row, feature in enumerate(features):
            ids = torch.tensor(feature["input_ids"]).long()[None]
            language = torch.full_like(ids, feature["language"])
            settings = {"max_new_tokens": int(1.3 * ids.shape[1]) + 5, "do_sample": False}
            target = 1 - language[:, :1]
            translation = model.eval().generate(input_ids=ids, langs=language, decoder_langs=target, **settings)
            if translation[0, -1] != tokenizer.eos_token_id:
                translation[0, -1] = tokenizer.eos_token_id
            noised = batch["input_ids"][row][batch["attention_mask"][row] == 1][None]
            for name, source, source_language in (
                ("denoising_loss", noised, feature["language"]),
                ("back_translation_loss", translation, 1 - feature["language"]),
            ):
                langs, labels = torch.full_like(source, source_language), ids[:, 1:]
                loss = model(input_ids=source, langs=langs, labels=labels, decoder_langs=language[:, 1:]).loss
                totals[name] += float(loss.detach()) * labels.numel()
        for name, total in totals.items():
            assert float(output[name]) == pytest.approx(total / count, rel=1e-4), name
        expected = 0.75 * totals["denoising_loss"] + 2 * totals["back_translation_loss"]
        assert float(output.loss.detach()) == pytest.approx(expected / count, rel=1e-4)

    def test_generation_has_no_side_effects(self, tokenizer: Any, family: str) -> None:
        """Modes of modules, random state and gradients do not change."""
        objective, model = BackTranslation(tokenizer, max_length=30), make_model(family, tokenizer).train()
        model.base_model.encoder.eval()
        modes = [module.training for module in model.modules()]
        batch, rng_state = objective.collate(make_features(objective)), torch.get_rng_state()
        columns = ("sentence_ids", "sentence_mask", "other_langs", "langs")
        translation = translate(model, *(batch[name] for name in columns))
        assert [module.training for module in model.modules()] == modes
        assert torch.equal(torch.get_rng_state(), rng_state)
        assert all(parameter.grad is None for parameter in model.parameters())
        ids, mask = translation["input_ids"], translation["attention_mask"].bool()
        for row in range(len(ids)):
            tokens = ids[row][mask[row]].tolist()
            assert tokens[0] == tokens[-1] == tokenizer.eos_token_id
            assert tokenizer.eos_token_id not in tokens[1:-1]
            assert set(ids[row][~mask[row]].tolist()) <= {tokenizer.pad_token_id}
        assert torch.equal(translation["langs"][:, 0], batch["other_langs"])


class TestSchedule:
    def test_interpolation(self) -> None:
        points = parse_weight_schedule("0:1,100000:0.1,300000:0", "lambda_ae")
        weights = [scheduled_weight(points, step) for step in (0, 50_000, 100_000, 200_000, 300_000, 400_000)]
        assert weights == pytest.approx([1, 0.55, 0.1, 0.05, 0, 0])
        assert scheduled_weight(parse_weight_schedule("0.5", "lambda_bt"), 7) == 0.5

    @pytest.mark.parametrize("text", ["", "one", "5:1,9:0", "0:1,0:2", "9:0,0:1"])
    def test_invalid_schedules(self, tokenizer: Any, text: str) -> None:
        with pytest.raises(CtxError, match="not a schedule of weights"):
            BackTranslation(tokenizer, max_length=30, lambda_ae=text)

    @pytest.mark.parametrize("text", ["0:1,9:-1", "-1", "nan", "inf", "0:1,9:nan", "0:inf,9:0"])
    def test_invalid_weights(self, tokenizer: Any, text: str) -> None:
        with pytest.raises(CtxError, match=r"has the weight (-1|nan|inf)\.(.|\n)*use finite weights of at least 0"):
            BackTranslation(tokenizer, max_length=30, lambda_bt=text)

    def test_zero_weights(self, tokenizer: Any) -> None:
        objective = BackTranslation(tokenizer, max_length=30, lambda_ae="0", lambda_bt="1")
        model = make_model("mass", tokenizer)
        output = objective.loss_function(model, objective.collate(make_features(objective)))
        assert output.denoising_loss is None
        objective = BackTranslation(tokenizer, max_length=30, lambda_ae="0", lambda_bt="0")
        with pytest.raises(CtxError, match="All weights are 0"):
            objective.loss_function(model, objective.collate(make_features(objective)))


def test_single_language_raises() -> None:
    one_language = FAMILIES["mass"].tokenizer.train(ENGLISH * 3, 120)
    with pytest.raises(CtxError, match="fewer than two languages"):
        BackTranslation(one_language, max_length=30)
    with pytest.raises(CtxError, match="fewer than two languages"):
        BackTranslation(CtxBertTokenizer.train(ENGLISH * 3, 300), max_length=30)


@pytest.fixture
def corpus(tokenizer: Any, tmp_path: Path) -> dict[str, Any]:
    """Texts in two languages, and flags of a short run."""
    for name, texts in (("en", ENGLISH), ("de", GERMAN)):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(texts * 4) + "\n")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return {
        "dataset": [tmp_path / "en.txt", tmp_path / "de.txt"],
        "language_tags": ["<en>", "<de>"],
        "objective": "back-translation:lambda_ae=0:1,4:0.5",
        "max_length": 30,
        "validation_fraction": 0,
        "per_device_batch_size": 8,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "dataloader_workers": 0,
        "no_cache": True,
    }


@pytest.mark.parametrize("family", [pytest.param("mass", marks=pytest.mark.slow), "xlm"])
def test_resumed_equals_uninterrupted_run(family: str, corpus: dict[str, Any], tokenizer: Any, tmp_path: Path) -> None:
    model = save(tmp_path / "model", make_model(family, tokenizer), tokenizer)
    flags = {**corpus, "model": model, "max_steps": 4, "save_steps": 2}
    uninterrupted, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert run_command("pretrain", **flags, output_dir=uninterrupted) == 0
    shutil.copytree(uninterrupted / "checkpoint-2", resumed / "checkpoint-2")
    assert run_command("pretrain", "--resume", **flags, output_dir=resumed) == 0
    expected, weights = (load_file(folder / "model.safetensors") for folder in (uninterrupted, resumed))
    assert [name for name, value in expected.items() if not torch.equal(weights[name], value)] == []
    entries = [entry for entry in read_log(uninterrupted) if "loss" in entry]
    for step, entry in enumerate(entries):
        weighted = (1 - step / 8) * entry["denoising_loss"] + entry["back_translation_loss"]
        assert entry["loss"] == pytest.approx(weighted, rel=1e-4)


def test_gradient_accumulation_equals_one_batch(corpus: dict[str, Any], tokenizer: Any, tmp_path: Path) -> None:
    model = save(tmp_path / "model", make_model("mass", tokenizer), tokenizer)
    weights = []
    for size, steps in ((16, 1), (4, 4)):
        flags = {**corpus, "per_device_batch_size": size, "gradient_accumulation_steps": steps, "max_steps": 1}
        output = tmp_path / f"out{size}"
        flags |= {"model": model, "output_dir": output, "optimizer": "sgd", "max_grad_norm": 0, "save_steps": 0}
        assert run_command("pretrain", **flags) == 0
        weights.append(load_file(output / "model.safetensors"))
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=0, atol=1e-6, msg=name)


def test_model_without_languages_raises(corpus: dict[str, Any], tmp_path: Path) -> None:
    bert_tokenizer = CtxBertTokenizer.train(ENGLISH * 3, 300)
    configs = {name: tiny_config(FAMILIES["bert"], vocab_size=len(bert_tokenizer)) for name in ("encoder", "decoder")}
    model = CtxEncoderDecoderForConditionalGeneration(CtxEncoderDecoderConfig(**configs, decoder_start_token_id=2))
    flags = {**corpus, "model": save(tmp_path / "model", model, bert_tokenizer), "max_steps": 1}
    message = command_output("pretrain", **flags, output_dir=tmp_path / "out", fails=True)
    assert "fewer than two languages" in message


def test_evaluation_of_loss_raises(corpus: dict[str, Any], tokenizer: Any, tmp_path: Path) -> None:
    model = save(tmp_path / "model", make_model("xlm", tokenizer), tokenizer)
    with pytest.raises(CtxError, match="The loss of the objective back-translation exists in training only"):
        PretrainingEvaluation.open(str(model), str(corpus["dataset"][0]))
