"""Encoder-decoder from two language models: copied weights, the decoder against its equations, generation."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from zoo import Case, make_batch, make_targets

from hf_ctxmodels import (
    CtxError,
    CtxLmSeq2SeqConfig,
    CtxLmSeq2SeqForConditionalGeneration,
    CtxLmSeq2SeqForPreTraining,
    CtxLmSeq2SeqTokenizer,
    CtxSeqaeConfig,
    CtxSeqaeForCausalLM,
    CtxSeqaeTokenizer,
    CtxUlmfitTokenizer,
)
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.model_loading import load_model

TRANSLATION = Case(FAMILIES["lmseq2seq"], "AutoModelForSeq2SeqLM")
PRETRAINING = Case(FAMILIES["lmseq2seq"], "AutoModelForPreTraining")
END = 2
TEXTS = {"source": ["a cat sat.", "the dog sat."], "target": ["eine Katze saß!", "der Hund, er saß!"]}


@pytest.fixture
def pair(tmp_path: Path) -> dict[str, Path]:
    """Language models of two languages, with their tokenizers."""
    for seed, (language, texts) in enumerate(TEXTS.items()):
        torch.manual_seed(seed)
        tokenizer = CtxSeqaeTokenizer.train(texts, 40, min_count=1, do_lower_case=language == "source")
        config = CtxSeqaeConfig(vocab_size=len(tokenizer), embedding_size=12, hidden_size=20)
        CtxSeqaeForCausalLM(config).save_pretrained(tmp_path / language)
        tokenizer.save_pretrained(tmp_path / language)
    return {language: tmp_path / language for language in TEXTS}


def has_pretrained_part(model: torch.nn.Module, language: str, part: str) -> bool:
    """Whether a part of a translation model has the weights of its language model."""
    stack = {"source": model.encoder, "target": model.decoder}[language]
    source = model.config.source_model if language == "source" else model.config.target_model
    lm = CtxSeqaeForCausalLM.from_pretrained(source)
    softmax = model.prediction if language == "target" else getattr(model, "source_prediction", None)
    modules = {
        "embeddings": (stack.word_embeddings, lm.seqae.word_embeddings),
        "layers": (stack.layers[0], lm.seqae.layers[0]),
        "softmax": (softmax, lm.decoder),
    }
    weights, expected = (module.state_dict() for module in modules[part])
    return all(torch.equal(weights[name], expected[name]) for name in expected)


class TestPair:
    @pytest.mark.parametrize("parts", [["embeddings", "layers", "softmax"], ["layers"], ["embeddings", "softmax"], []])
    def test_pretrained_parts(self, pair: dict[str, Path], parts: list[str]) -> None:
        model = CtxLmSeq2SeqForPreTraining.from_pretrained_pair(**pair, pretrained_parts=parts)
        for language in TEXTS:
            for part in ("embeddings", "layers", "softmax"):
                assert has_pretrained_part(model, language, part) == (part in parts), f"{part} of {language}"

    def test_one_language_model(self, pair: dict[str, Path]) -> None:
        sizes = CtxLmSeq2SeqForPreTraining.from_pretrained_pair(**pair).config.to_diff_dict()
        fields = {name: sizes[name] for name in ("vocab_size", "target_vocab_size", "embedding_size", "hidden_size")}
        model = CtxLmSeq2SeqForPreTraining(CtxLmSeq2SeqConfig(**fields, target_model=str(pair["target"])))
        assert not has_pretrained_part(model, "target", "layers"), "construction must not load the language models"
        model.load_pretrained_components()
        assert has_pretrained_part(model, "target", "layers")
        assert has_pretrained_part(model, "target", "softmax")

    def test_weights_of_a_checkpoint_are_not_overwritten(self, pair: dict[str, Path], tmp_path: Path) -> None:
        """Only weights that are missing in the checkpoint are copied from the language models."""
        model = CtxLmSeq2SeqForConditionalGeneration.from_pretrained_pair(**pair)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        model.save_pretrained(tmp_path / "translator")
        loaded = load_model(tmp_path / "translator", "AutoModelForPreTraining", model.config)
        assert torch.equal(loaded.prediction.weight, model.prediction.weight)
        assert torch.equal(loaded.encoder.word_embeddings.weight, model.encoder.word_embeddings.weight)
        assert has_pretrained_part(loaded, "source", "softmax")

    def test_pretrained_layers_equal_the_language_models(self, pair: dict[str, Path]) -> None:
        model = CtxLmSeq2SeqForPreTraining.from_pretrained_pair(**pair)
        ids = torch.randint(3, 8, (2, 6), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            outputs = model(input_ids=ids, decoder_input_ids=ids)
            for language, logits in {"source": outputs.source_logits, "target": outputs.target_logits}.items():
                expected = CtxSeqaeForCausalLM.from_pretrained(pair[language])(input_ids=ids).logits
                torch.testing.assert_close(logits, expected)

    def test_checkpoints_do_not_need_the_language_models(self, pair: dict[str, Path], tmp_path: Path) -> None:
        model = CtxLmSeq2SeqForPreTraining.from_pretrained_pair(**pair)
        with torch.no_grad():
            model.decoder.word_embeddings.weight.add_(1.0)
        model.save_pretrained(tmp_path / "translator")
        for folder in pair.values():
            (folder / "model.safetensors").unlink()
        for model_class in (CtxLmSeq2SeqForPreTraining, CtxLmSeq2SeqForConditionalGeneration):
            loaded = model_class.from_pretrained(tmp_path / "translator")
            assert torch.equal(loaded.decoder.word_embeddings.weight, model.decoder.word_embeddings.weight)
            assert torch.equal(loaded.prediction.weight, model.prediction.weight)

    def test_tokenizer_has_both_vocabularies(self, pair: dict[str, Path], tmp_path: Path) -> None:
        pairs = (f"{source}\t{target}" for source, target in zip(*TEXTS.values(), strict=True))
        folders = {f"{language}_model": str(folder) for language, folder in pair.items()}
        CtxLmSeq2SeqTokenizer.train(pairs, 99, **folders).save_pretrained(tmp_path / "words")
        tokenizer = CtxLmSeq2SeqTokenizer.from_pretrained(tmp_path / "words")
        source, target = (CtxSeqaeTokenizer.from_pretrained(folder) for folder in pair.values())
        assert tokenizer("The dog sat.").input_ids == source("The dog sat.").input_ids
        ids = tokenizer(text_target="der Hund saß!").input_ids
        assert ids == target("der Hund saß!").input_ids
        assert tokenizer.decode_target([[tokenizer.target_start_id, *ids]]) == ["der Hund saß!"]
        assert tokenizer.target_start_id == tokenizer.target_end_id == END

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"hidden_size": 24}, "layers.0"),
            ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
            ({"target_vocab_size": 9}, "word_embeddings"),
            ({"pretrained_layers": 2}, "1 layers"),
        ],
        ids=str,
    )
    def test_shapes_that_do_not_match(self, pair: dict[str, Path], changes: dict, message: str) -> None:
        with pytest.raises(CtxError, match=message):
            CtxLmSeq2SeqForConditionalGeneration.from_pretrained_pair(**pair, **changes)

    def test_other_models_are_an_error(self, pair: dict[str, Path], tmp_path: Path) -> None:
        with pytest.raises(CtxError, match="Cannot load"):
            CtxLmSeq2SeqForConditionalGeneration.from_pretrained_pair(tmp_path / "none", pair["target"])
        CtxUlmfitTokenizer.train(TEXTS["source"], 40, min_count=1).save_pretrained(tmp_path / "other")
        with pytest.raises(CtxError, match="not a reversible word tokenizer"):
            CtxLmSeq2SeqTokenizer.from_pretrained_pair(tmp_path / "other", pair["target"])
        with pytest.raises(CtxError, match="pass both"):
            CtxLmSeq2SeqTokenizer.train(["a"], 9, source_model=str(pair["source"]))


def run_layers(
    stack: torch.nn.Module, vectors: Tensor, initial_states: list | None = None
) -> tuple[list[Tensor], list]:
    """(steps, hidden) outputs of all layers, step by step, and their final states."""
    outputs, final_states = [vectors], []
    for depth, layer in enumerate(stack.layers):
        width = layer.cell_size
        hidden, cell = (torch.zeros(width), torch.zeros(width)) if initial_states is None else initial_states[depth]
        steps = []
        for vector in outputs[-1]:
            gates = layer.input_weight[0] @ vector + layer.state_weight[0] @ hidden + (layer.bias + layer.state_bias)[0]
            input_gate, forget_gate, candidate, output_gate = gates.chunk(4)
            cell = forget_gate.sigmoid() * cell + input_gate.sigmoid() * candidate.tanh()
            hidden = output_gate.sigmoid() * cell.tanh()
            steps.append(hidden)
        outputs.append(torch.stack(steps))
        final_states.append((hidden, cell))
    return outputs[1:], final_states


@torch.no_grad()
def reference_log_probabilities(model: CtxLmSeq2SeqForConditionalGeneration, ids: Tensor, target: list[int]) -> Tensor:
    """(steps, vocabulary) log-probabilities of the word after each word of `target`, for one text."""
    config, first = model.config, model.config.pretrained_layers - 1
    source, final_states = run_layers(model.encoder, model.encoder.word_embeddings.weight[ids])
    decoded, _ = run_layers(model.decoder, model.decoder.word_embeddings.weight[target], final_states)
    logs = []
    for lower, top in zip(decoded[first], decoded[-1], strict=True):
        weights = torch.softmax(source[-1] @ (model.query.weight @ top + model.query.bias), 0)
        contexts = [source[first].T @ weights] if config.multi_layer_attention else []
        features = torch.cat([*contexts, source[-1].T @ weights, top])
        state = torch.tanh(model.combine.weight @ features + model.combine.bias)
        state = state + lower if config.residual else state
        logs.append((model.prediction.weight @ state + model.prediction.bias).log_softmax(0))
    return torch.stack(logs)


@pytest.mark.parametrize(
    "changes",
    [{}, {"residual": False}, {"multi_layer_attention": False}, {"pretrained_layers": 2}],
    ids=lambda changes: "-".join(changes) or "default",
)
def test_decoder_matches_the_equations(changes: dict) -> None:
    """Logits, and the loss of padded sequences of several lengths."""
    model, batch = TRANSLATION.model(3, initializer_range=0.5, **changes), make_batch(TRANSLATION)
    labels = make_targets(TRANSLATION, batch)["labels"].masked_fill_(torch.tensor([[0, 0, 0, 0, 0, 1]]).bool(), -100)
    with torch.no_grad():
        logits = model(**batch).logits.log_softmax(-1)
        loss = model(**batch, labels=labels).loss
    total = torch.zeros(())
    for row, tokens in enumerate(batch["attention_mask"].bool()):
        expected = reference_log_probabilities(
            model, batch["input_ids"][row][tokens], batch["decoder_input_ids"][row].tolist()
        )
        torch.testing.assert_close(logits[row], expected, atol=1e-5, rtol=1e-5)
        total += F.nll_loss(expected, labels[row], ignore_index=-100, reduction="sum")
    torch.testing.assert_close(loss, total / (labels != -100).sum())


class TestLanguageModels:
    def test_losses_without_targets_are_omitted(self) -> None:
        model, batch = PRETRAINING.model(), make_batch(PRETRAINING)
        targets = make_targets(PRETRAINING, batch)
        translation = model(**batch, labels=targets["labels"])
        assert translation.source_lm_loss is None
        assert translation.target_lm_loss is None
        output = model(**batch, **targets)
        losses = (output.translation_loss, output.source_lm_loss, output.target_lm_loss)
        assert torch.equal(translation.loss.detach(), output.translation_loss)
        torch.testing.assert_close(output.loss.detach(), sum(losses))

    def test_target_language_model_does_not_depend_on_the_source(self) -> None:
        model, batch = PRETRAINING.model(), make_batch(PRETRAINING)
        targets = make_targets(PRETRAINING, batch)
        other_sources = batch | {
            "input_ids": batch["input_ids"].roll(1, 0),
            "attention_mask": batch["attention_mask"].roll(1, 0),
        }
        labels = {name: targets[name] for name in ("labels", "target_labels")}
        losses = [model(**inputs, **labels) for inputs in (batch, other_sources)]
        assert losses[0].target_lm_loss == losses[1].target_lm_loss
        assert losses[0].translation_loss != losses[1].translation_loss

    def test_language_models_only_use_the_pretrained_layers(self) -> None:
        model, batch = PRETRAINING.model(), make_batch(PRETRAINING)
        batch |= make_targets(PRETRAINING, batch)
        before = model(**batch)
        for stack in (model.encoder, model.decoder):
            for parameter in stack.layers[model.config.pretrained_layers :].parameters():
                torch.nn.init.normal_(parameter)
        after = model(**batch)
        assert torch.equal(before.source_lm_loss, after.source_lm_loss)
        assert torch.equal(before.target_lm_loss, after.target_lm_loss)
        assert before.translation_loss != after.translation_loss

    @pytest.mark.parametrize("name", ["source_labels", "target_labels"])
    def test_labels_of_another_shape_are_an_error(self, name: str) -> None:
        batch = make_batch(PRETRAINING)
        targets = make_targets(PRETRAINING, batch)
        with pytest.raises(CtxError, match=name):
            PRETRAINING.model()(**batch, **{**targets, name: targets[name][:, :-1]})


class TestGenerate:
    def inputs(self) -> dict[str, Tensor]:
        batch = make_batch(TRANSLATION, (7, 3, 5))
        return {name: batch[name] for name in ("input_ids", "attention_mask")}

    @pytest.mark.parametrize("case", [TRANSLATION, PRETRAINING], ids=str)
    def test_greedy_is_the_likeliest_word_again_and_again(self, case: Case) -> None:
        model, batch = case.model(6, initializer_range=0.9), self.inputs()
        written = model.generate(**batch, do_sample=False, max_new_tokens=7)
        assert len(written.unique()) > 5, "too dull a text to tell anything"
        for row, tokens in enumerate(batch["attention_mask"].bool()):
            text = [END]
            while len(text) < 8 and (len(text) == 1 or text[-1] != END):
                text.append(int(reference_log_probabilities(model, batch["input_ids"][row][tokens], text)[-1].argmax()))
            assert written[row, : len(text)].tolist() == text

    @pytest.mark.parametrize("beams", [1, 4])
    def test_the_state_is_the_whole_text_read_anew(self, beams: int) -> None:
        model, batch = TRANSLATION.model(3, initializer_range=0.9), self.inputs()
        options = {"num_beams": beams, "do_sample": False, "max_new_tokens": 7}
        expected = model.generate(**batch, **options, use_cache=False)
        assert torch.equal(model.generate(**batch, **options), expected)
        alone = model.generate(batch["input_ids"][1:2, :3], **options)[0]
        assert torch.equal(alone, expected[1, : len(alone)])


@pytest.mark.parametrize(
    "wrong",
    [{"pretrained_layers": 4}, {"pretrained_parts": ["attention"]}, {"hidden_size": 0}],
    ids=lambda w: next(iter(w)),
)
def test_configurations_that_are_none(wrong: dict) -> None:
    with pytest.raises(Exception, match=next(iter(wrong))):
        CtxLmSeq2SeqConfig(**wrong)
