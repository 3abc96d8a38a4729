"""Encoder-decoders initialized from two language models: copied weights, vocabularies and losses."""

from pathlib import Path

import pytest
import torch
from zoo import Case, make_batch, make_targets

from hf_ctxmodels import (
    CtxError,
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

    def test_target_language_model_only(self, pair: dict[str, Path]) -> None:
        config = CtxLmSeq2SeqForPreTraining.from_pretrained_pair(**pair).config
        config.source_model = None
        model = CtxLmSeq2SeqForPreTraining(config)
        assert not has_pretrained_part(model, "target", "layers"), "construction must not load the language models"
        model.load_pretrained_components()
        assert has_pretrained_part(model, "target", "layers")
        assert has_pretrained_part(model, "target", "softmax")

    def test_checkpoint_weights_are_not_overwritten(self, pair: dict[str, Path], tmp_path: Path) -> None:
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

    def test_pretrained_layers_match_language_models(self, pair: dict[str, Path]) -> None:
        model = CtxLmSeq2SeqForPreTraining.from_pretrained_pair(**pair)
        ids = torch.randint(3, 8, (2, 6), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            outputs = model(input_ids=ids, decoder_input_ids=ids)
            for language, logits in {"source": outputs.source_logits, "target": outputs.target_logits}.items():
                expected = CtxSeqaeForCausalLM.from_pretrained(pair[language])(input_ids=ids).logits
                torch.testing.assert_close(logits, expected)

    def test_checkpoints_load_without_language_models(self, pair: dict[str, Path], tmp_path: Path) -> None:
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
        trained = CtxLmSeq2SeqTokenizer.train(pairs, 99, model_max_length=77, **folders)
        trained.save_pretrained(tmp_path / "words")
        tokenizer = CtxLmSeq2SeqTokenizer.from_pretrained(tmp_path / "words")
        assert tokenizer.model_max_length == 77
        source, target = (CtxSeqaeTokenizer.from_pretrained(folder) for folder in pair.values())
        assert tokenizer("The dog sat.").input_ids == source("The dog sat.").input_ids
        ids = tokenizer(text_target="der Hund saß!").input_ids
        assert ids == target("der Hund saß!").input_ids
        assert tokenizer.decode_target([[tokenizer.target_start_id, *ids]]) == ["der Hund saß!"]
        assert tokenizer.target_start_id == tokenizer.target_end_id == END

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            ({"hidden_size": 24}, "layers.0"),
            ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
            ({"target_vocab_size": 9}, "word_embeddings"),
            ({"pretrained_layers": 2}, "1 layers"),
        ],
        ids=str,
    )
    def test_mismatched_shapes_raise(self, pair: dict[str, Path], overrides: dict, message: str) -> None:
        with pytest.raises(CtxError, match=message):
            CtxLmSeq2SeqForConditionalGeneration.from_pretrained_pair(**pair, **overrides)

    def test_unsupported_models_raise(self, pair: dict[str, Path], tmp_path: Path) -> None:
        with pytest.raises(CtxError, match="Cannot load"):
            CtxLmSeq2SeqForConditionalGeneration.from_pretrained_pair(tmp_path / "none", pair["target"])
        CtxUlmfitTokenizer.train(TEXTS["source"], 40, min_count=1).save_pretrained(tmp_path / "other")
        with pytest.raises(CtxError, match="not a reversible word tokenizer"):
            CtxLmSeq2SeqTokenizer.from_pretrained_pair(tmp_path / "other", pair["target"])
        with pytest.raises(CtxError, match="pass both"):
            CtxLmSeq2SeqTokenizer.train(["a"], 9, source_model=str(pair["source"]))
        folders = {f"{language}_model": str(folder) for language, folder in pair.items()}
        with pytest.raises(CtxError, match="min_count: the vocabularies and rules of the language models are used"):
            CtxLmSeq2SeqTokenizer.train(["a"], 9, min_count=1, **folders)


class TestLanguageModels:
    def test_losses_depend_on_their_targets_and_layers(self) -> None:
        model, batch = PRETRAINING.model(), make_batch(PRETRAINING)
        targets = make_targets(PRETRAINING, batch)
        translation = model(**batch, labels=targets["labels"])
        assert translation.source_lm_loss is None
        assert translation.target_lm_loss is None
        before = model(**batch, **targets)
        losses = (before.translation_loss, before.source_lm_loss, before.target_lm_loss)
        assert torch.equal(translation.loss.detach(), before.translation_loss)
        torch.testing.assert_close(before.loss.detach(), sum(losses))
        permuted_sources = {name: batch[name].roll(1, 0) for name in ("input_ids", "attention_mask")}
        permuted = model(**batch | permuted_sources, labels=targets["labels"], target_labels=targets["target_labels"])
        assert permuted.target_lm_loss == before.target_lm_loss
        assert permuted.translation_loss != before.translation_loss
        for stack in (model.encoder, model.decoder):
            for parameter in stack.layers[model.config.pretrained_layers :].parameters():
                torch.nn.init.normal_(parameter)
        after = model(**batch, **targets)
        assert torch.equal(before.source_lm_loss, after.source_lm_loss)
        assert torch.equal(before.target_lm_loss, after.target_lm_loss)
        assert before.translation_loss != after.translation_loss


def test_encoder_alone_is_a_language_model_encoder() -> None:
    """It returns the inputs of a decoder only as part of the sequence-to-sequence model, and takes packed rows."""
    case = Case(FAMILIES["lmseq2seq"], "AutoModel")
    batch = make_batch(case)
    outputs = case.model()(**batch, sequence_ids=torch.ones_like(batch["input_ids"]))
    assert not {"memory", "final", "hidden_states", "past_key_values"} & {*outputs}
