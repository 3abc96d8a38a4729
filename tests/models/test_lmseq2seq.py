"""The translator made of two language models: what is taken, what the decoder computes, what `generate` writes."""

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

TRANSLATOR = Case(FAMILIES["lmseq2seq"], "AutoModelForSeq2SeqLM")
TRAINED = Case(FAMILIES["lmseq2seq"], "AutoModelForPreTraining")
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


def with_part(model: torch.nn.Module, language: str, part: str) -> bool:
    """Whether a translator's part is that of its language model."""
    own = {"source": model.encoder, "target": model.decoder}[language]
    source = model.config.source_model if language == "source" else model.config.target_model
    lm = CtxSeqaeForCausalLM.from_pretrained(source)
    softmax = model.prediction if language == "target" else getattr(model, "source_prediction", None)
    modules = {
        "embeddings": (own.word_embeddings, lm.seqae.word_embeddings),
        "layers": (own.layers[0], lm.seqae.layers[0]),
        "softmax": (softmax, lm.decoder),
    }
    ours, theirs = (each.state_dict() for each in modules[part])
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


class TestPair:
    @pytest.mark.parametrize("taken", [["embeddings", "layers", "softmax"], ["layers"], ["embeddings", "softmax"], []])
    def test_what_is_taken(self, pair: dict[str, Path], taken: list[str]) -> None:
        model = CtxLmSeq2SeqForPreTraining.from_pretrained_pair(**pair, pretrained_parts=taken)
        for language in TEXTS:
            for part in ("embeddings", "layers", "softmax"):
                assert with_part(model, language, part) == (part in taken), f"{part} of {language}"

    def test_one_side_alone(self, pair: dict[str, Path]) -> None:
        sizes = CtxLmSeq2SeqForPreTraining.from_pretrained_pair(**pair).config.to_diff_dict()
        kept = {name: sizes[name] for name in ("vocab_size", "target_vocab_size", "embedding_size", "hidden_size")}
        model = CtxLmSeq2SeqForPreTraining(CtxLmSeq2SeqConfig(**kept, target_model=str(pair["target"])))
        assert not with_part(model, "target", "layers"), "construction opens no other model"
        model.load_pretrained_components()
        assert with_part(model, "target", "layers")
        assert with_part(model, "target", "softmax")

    def test_what_a_checkpoint_holds_is_kept(self, pair: dict[str, Path], tmp_path: Path) -> None:
        """A translator without language models, opened with them: only the weights that it lacks are copied."""
        model = CtxLmSeq2SeqForConditionalGeneration.from_pretrained_pair(**pair)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        model.save_pretrained(tmp_path / "translator")
        again = load_model(tmp_path / "translator", "AutoModelForPreTraining", model.config)
        assert torch.equal(again.prediction.weight, model.prediction.weight)
        assert torch.equal(again.encoder.word_embeddings.weight, model.encoder.word_embeddings.weight)
        assert with_part(again, "source", "softmax")

    def test_its_first_layers_are_the_language_models(self, pair: dict[str, Path]) -> None:
        """What they say of a text is what they said before they were taken."""
        model = CtxLmSeq2SeqForPreTraining.from_pretrained_pair(**pair)
        ids = torch.randint(3, 8, (2, 6), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            outputs = model(input_ids=ids, decoder_input_ids=ids)
            for language, logits in {"source": outputs.source_logits, "target": outputs.target_logits}.items():
                expected = CtxSeqaeForCausalLM.from_pretrained(pair[language])(input_ids=ids).logits
                torch.testing.assert_close(logits, expected)

    def test_saved_with_the_model(self, pair: dict[str, Path], tmp_path: Path) -> None:
        """What was saved opens without the language models, trained as it is; the same translator, too."""
        model = CtxLmSeq2SeqForPreTraining.from_pretrained_pair(**pair)
        with torch.no_grad():
            model.decoder.word_embeddings.weight.add_(1.0)
        model.save_pretrained(tmp_path / "translator")
        for folder in pair.values():
            (folder / "model.safetensors").unlink()
        for kind in (CtxLmSeq2SeqForPreTraining, CtxLmSeq2SeqForConditionalGeneration):
            again = kind.from_pretrained(tmp_path / "translator")
            assert torch.equal(again.decoder.word_embeddings.weight, model.decoder.word_embeddings.weight)
            assert torch.equal(again.prediction.weight, model.prediction.weight)

    def test_tokenizer_has_the_words_of_both(self, pair: dict[str, Path], tmp_path: Path) -> None:
        pairs = (f"{text}\t{other}" for text, other in zip(*TEXTS.values(), strict=True))
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
        ids=lambda given: str(given),
    )
    def test_what_does_not_fit_is_refused(self, pair: dict[str, Path], changes: dict, message: str) -> None:
        with pytest.raises(CtxError, match=message):
            CtxLmSeq2SeqForConditionalGeneration.from_pretrained_pair(**pair, **changes)

    def test_what_is_no_language_model_is_refused(self, pair: dict[str, Path], tmp_path: Path) -> None:
        with pytest.raises(CtxError, match="Cannot open"):
            CtxLmSeq2SeqForConditionalGeneration.from_pretrained_pair(tmp_path / "none", pair["target"])
        CtxUlmfitTokenizer.train(TEXTS["source"], 40, min_count=1).save_pretrained(tmp_path / "other")
        with pytest.raises(CtxError, match="decode to the exact text"):
            CtxLmSeq2SeqTokenizer.from_pretrained_pair(tmp_path / "other", pair["target"])
        with pytest.raises(CtxError, match="give both"):
            CtxLmSeq2SeqTokenizer.train(["a"], 9, source_model=str(pair["source"]))


def feature_lookup(
    stack: torch.nn.Module, vectors: Tensor, remembered: list | None = None
) -> tuple[list[Tensor], list]:
    """(steps, hidden) of every layer, one step at a time; and where each ends."""
    outputs, ends = [vectors], []
    for depth, layer in enumerate(stack.layers):
        width = layer.cell_size
        hidden, cell = (torch.zeros(width), torch.zeros(width)) if remembered is None else remembered[depth]
        steps = []
        for vector in outputs[-1]:
            gates = layer.input_weight[0] @ vector + layer.state_weight[0] @ hidden + (layer.bias + layer.state_bias)[0]
            into, forget, new, out = gates.chunk(4)
            cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
            hidden = out.sigmoid() * cell.tanh()
            steps.append(hidden)
        outputs.append(torch.stack(steps))
        ends.append((hidden, cell))
    return outputs[1:], ends


@torch.no_grad()
def by_the_equations(model: CtxLmSeq2SeqForConditionalGeneration, ids: Tensor, target: list[int]) -> Tensor:
    """(steps, vocabulary) log-probabilities of the words behind each of `target`, of one text."""
    config, first = model.config, model.config.pretrained_layers - 1
    source, ends = feature_lookup(model.encoder, model.encoder.word_embeddings.weight[ids])
    written, _ = feature_lookup(model.decoder, model.decoder.word_embeddings.weight[target], ends)
    logs = []
    for below, top in zip(written[first], written[-1], strict=True):
        weights = torch.softmax(source[-1] @ (model.query.weight @ top + model.query.bias), 0)
        contexts = [source[first].T @ weights] if config.multi_layer_attention else []
        joined = torch.cat([*contexts, source[-1].T @ weights, top])
        state = torch.tanh(model.combine.weight @ joined + model.combine.bias)
        state = state + below if config.residual else state
        logs.append((model.prediction.weight @ state + model.prediction.bias).log_softmax(0))
    return torch.stack(logs)


@pytest.mark.parametrize(
    "changes",
    [{}, {"residual": False}, {"multi_layer_attention": False}, {"pretrained_layers": 2}],
    ids=lambda changes: "-".join(changes) or "as it is",
)
def test_decoder_is_the_papers(changes: dict) -> None:
    """And the loss of padded rows of several lengths."""
    model, batch = TRANSLATOR.model(3, initializer_range=0.5, **changes), make_batch(TRANSLATOR)
    labels = make_targets(TRANSLATOR, batch)["labels"].masked_fill_(torch.tensor([[0, 0, 0, 0, 0, 1]]).bool(), -100)
    with torch.no_grad():
        logits = model(**batch).logits.log_softmax(-1)
        loss = model(**batch, labels=labels).loss
    total = torch.zeros(())
    for row, tokens in enumerate(batch["attention_mask"].bool()):
        expected = by_the_equations(model, batch["input_ids"][row][tokens], batch["decoder_input_ids"][row].tolist())
        torch.testing.assert_close(logits[row], expected, atol=1e-5, rtol=1e-5)
        total += F.nll_loss(expected, labels[row], ignore_index=-100, reduction="sum")
    torch.testing.assert_close(loss, total / (labels != -100).sum())


class TestLanguageModels:
    def test_terms_without_their_targets_are_left_out(self) -> None:
        model, batch = TRAINED.model(), make_batch(TRAINED)
        targets = make_targets(TRAINED, batch)
        alone = model(**batch, labels=targets["labels"])
        assert alone.source_lm_loss is None
        assert alone.target_lm_loss is None
        every = model(**batch, **targets)
        terms = (every.translation_loss, every.source_lm_loss, every.target_lm_loss)
        assert torch.equal(alone.loss.detach(), every.translation_loss)
        torch.testing.assert_close(every.loss.detach(), sum(terms))

    def test_they_know_nothing_of_the_other_language(self) -> None:
        model, batch = TRAINED.model(), make_batch(TRAINED)
        targets = make_targets(TRAINED, batch)
        other = batch | {
            "input_ids": batch["input_ids"].roll(1, 0),
            "attention_mask": batch["attention_mask"].roll(1, 0),
        }
        labels = {name: targets[name] for name in ("labels", "target_labels")}
        losses = [model(**each, **labels) for each in (batch, other)]
        assert losses[0].target_lm_loss == losses[1].target_lm_loss
        assert losses[0].translation_loss != losses[1].translation_loss

    def test_they_are_the_pretrained_layers_alone(self) -> None:
        model, batch = TRAINED.model(), make_batch(TRAINED)
        batch |= make_targets(TRAINED, batch)
        before = model(**batch)
        for stack in (model.encoder, model.decoder):
            for parameter in stack.layers[model.config.pretrained_layers :].parameters():
                torch.nn.init.normal_(parameter)
        after = model(**batch)
        assert torch.equal(before.source_lm_loss, after.source_lm_loss)
        assert torch.equal(before.target_lm_loss, after.target_lm_loss)
        assert before.translation_loss != after.translation_loss

    @pytest.mark.parametrize("name", ["source_labels", "target_labels"])
    def test_labels_of_another_shape_are_refused(self, name: str) -> None:
        batch = make_batch(TRAINED)
        targets = make_targets(TRAINED, batch)
        with pytest.raises(CtxError, match=name):
            TRAINED.model()(**batch, **{**targets, name: targets[name][:, :-1]})


class TestGenerate:
    def inputs(self) -> dict[str, Tensor]:
        batch = make_batch(TRANSLATOR, (7, 3, 5))
        return {name: batch[name] for name in ("input_ids", "attention_mask")}

    @pytest.mark.parametrize("case", [TRANSLATOR, TRAINED], ids=str)
    def test_greedy_is_the_likeliest_word_again_and_again(self, case: Case) -> None:
        model, batch = case.model(6, initializer_range=0.9), self.inputs()
        written = model.generate(**batch, do_sample=False, max_new_tokens=7)
        assert len(written.unique()) > 5, "too dull a text to tell anything"
        for row, tokens in enumerate(batch["attention_mask"].bool()):
            text = [END]
            while len(text) < 8 and (len(text) == 1 or text[-1] != END):
                text.append(int(by_the_equations(model, batch["input_ids"][row][tokens], text)[-1].argmax()))
            assert written[row, : len(text)].tolist() == text

    @pytest.mark.parametrize("beams", [1, 4])
    def test_the_state_is_the_whole_text_read_anew(self, beams: int) -> None:
        model, batch = TRANSLATOR.model(3, initializer_range=0.9), self.inputs()
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
