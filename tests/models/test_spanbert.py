"""What is SpanBERT's own: the span boundary term, against plain loops, and the released head."""

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import BertForMaskedLM
from zoo import PATHS, SIDES, Case, assert_close, assert_same_gradients, gradients, make_batch, make_targets

from hf_ctxmodels import CtxSpanBertForPreTraining, CtxSpanBertModel, CtxSpanBertTokenizer
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.registry import FAMILIES

PRETRAINING = Case(FAMILIES["spanbert"], "AutoModelForPreTraining")
RELEASED = {  # native name -> that of the release, whose LayerNorms have gamma and beta
    "position_embeddings.weight": "position_embeddings.weight",
    "first_dense.weight": "mlp_layer_norm.linear1.weight",
    "first_dense.bias": "mlp_layer_norm.linear1.bias",
    "first_norm.weight": "mlp_layer_norm.layer_norm1.gamma",
    "first_norm.bias": "mlp_layer_norm.layer_norm1.beta",
    "second_dense.weight": "mlp_layer_norm.linear2.weight",
    "second_dense.bias": "mlp_layer_norm.linear2.bias",
    "second_norm.weight": "mlp_layer_norm.layer_norm2.gamma",
    "second_norm.bias": "mlp_layer_norm.layer_norm2.beta",
    "decoder.bias": "bias",
}


def loss_by_loops(model, batch, labels, boundary_labels):
    """Both terms, one target at a time."""
    states, head = model.bert(**batch).last_hidden_state, model.sbo_head
    logits = model.mlm_head(states)
    mlm, sbo = [], []
    for row in range(len(labels)):
        for place in range(labels.shape[1]):
            if labels[row, place] != -100:
                mlm.append(F.cross_entropy(logits[row, place], labels[row, place]))
            if boundary_labels[row, place] != -100:
                before = after = place
                while labels[row, before] != -100:
                    before -= 1
                while labels[row, after] != -100:
                    after += 1
                position = head.position_embeddings.weight[place - before - 1]
                vector = torch.cat([states[row, before], states[row, after], position])
                vector = head.first_norm(F.gelu(head.first_dense(vector)))
                vector = head.second_norm(F.gelu(head.second_dense(vector)))
                sbo.append(F.cross_entropy(head.decoder(vector), boundary_labels[row, place]))
    return torch.stack(mlm).mean(), torch.stack(sbo).sum() / (len(sbo) + 1)


@pytest.mark.parametrize("side", SIDES)
def test_both_terms_are_those_of_the_loops(side):
    """By every path, with the logits of all positions and without."""
    batch = make_batch(PRETRAINING, (20, 9, 1, 16, 20, 18), side=side)
    targets = make_targets(PRETRAINING, batch)
    boundary = targets["boundary_labels"] != -100
    assert (boundary[:, 1:] & boundary[:, :-1]).any(), "a span of two tokens"
    slow = PRETRAINING.model(**PATHS["eager"])
    mlm, sbo = loss_by_loops(slow, batch, targets["labels"], targets["boundary_labels"])
    wanted = gradients(slow, mlm + sbo)
    for path, options in PATHS.items():
        for everywhere in (False, True):
            model = PRETRAINING.model(**options)
            found = model(**batch, **targets, return_logits=everywhere)
            where = f"by the {path} path"
            assert_close(found.mlm_loss, mlm.detach(), f"mlm_loss {where}")
            assert_close(found.sbo_loss, sbo.detach(), f"sbo_loss {where}")
            assert_same_gradients(gradients(model, found.loss), wanted, where=where)


def test_packed_sequences_are_as_if_alone():
    model = PRETRAINING.model()
    ids = torch.randint(5, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    labels = torch.full_like(ids, -100)
    labels[:, 2:5], labels[1, 7] = ids[:, 2:5], ids[1, 7]
    apart = model(input_ids=ids, labels=labels, boundary_labels=labels)
    numbers = torch.tensor([[1] * 9 + [2] * 9])
    joined = {"input_ids": ids.view(1, -1), "labels": labels.view(1, -1), "boundary_labels": labels.view(1, -1)}
    assert_close(model(**joined, sequence_ids=numbers).loss, apart.loss)


def test_without_the_boundary_objective_it_is_the_masked_language_model():
    batch = make_batch(PRETRAINING)
    labels = make_targets(PRETRAINING, batch)["labels"]
    outputs = PRETRAINING.model()(**batch, labels=labels)
    assert outputs.sbo_loss is None
    assert outputs.metrics is None
    assert_close(outputs.loss.detach(), outputs.mlm_loss)


def test_targets_that_no_span_has():
    model, ids = PRETRAINING.model(), torch.full((1, 9), 7)
    with pytest.raises(CtxError, match="needs labels"):
        model(input_ids=ids, boundary_labels=ids)
    for spans, target in (
        ((2, 4), 6),
        ((0, 2), 1),
        ((6, 9), 7),
        ((1, 8), 4),
    ):  # outside, both ends, the fourth of three
        labels, boundary_labels = torch.full_like(ids, -100), torch.full_like(ids, -100)
        labels[0, slice(*spans)], boundary_labels[0, target] = 7, 7
        with pytest.raises(CtxError, match=rf"target at \[0, {target}\]"):
            model(input_ids=ids, labels=labels, boundary_labels=boundary_labels)


def test_the_released_head_is_opened(tmp_path):
    """Its names are those of the pretraining code; the encoder and the export do without it."""
    model = PRETRAINING.model(seed=4)
    model.export_reference(tmp_path)
    reference, report = BertForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    batch = make_batch(PRETRAINING)
    mask = batch["attention_mask"] == 1
    assert_close(reference.eval()(**batch).logits[mask], model(**batch).prediction_logits[mask])
    weights = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    head = model.sbo_head.state_dict()
    released = {f"cls.pair_target_predictions.{theirs}": head[ours].clone() for ours, theirs in RELEASED.items()}
    released["cls.pair_target_predictions.decoder.weight"] = head["decoder.weight"].clone()
    options = {"max_pair_targets": model.config.max_pair_targets, "pair_position_size": model.config.pair_position_size}
    for prefix in ("", "decoder."):  # the second in fairseq's checkpoints
        named = {f"{prefix}{name}": tensor for name, tensor in (weights | released).items()}
        save_file(named, tmp_path / "model.safetensors", metadata={"format": "pt"})
        opened, report = CtxSpanBertForPreTraining.from_pretrained(tmp_path, **options, output_loading_info=True)
        assert not any(report.values()), report
        for name, tensor in model.state_dict().items():
            assert torch.equal(opened.state_dict()[name], tensor), name
        encoder, report = CtxSpanBertModel.from_pretrained(tmp_path, output_loading_info=True)
        assert not report["unexpected_keys"]
        assert torch.equal(encoder.embeddings.word_embeddings.weight, model.bert.embeddings.word_embeddings.weight)


def test_text_keeps_its_case():
    tokenizer = CtxSpanBertTokenizer.train(["A cat sat on A mat"] * 3, vocab_size=40)
    assert "A" in tokenizer.tokenize("A cat")
    assert not CtxSpanBertTokenizer(vocab=tokenizer.get_vocab()).do_lower_case
