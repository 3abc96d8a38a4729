"""SpanBERT: span boundary loss compared with loops over targets, and released checkpoints."""

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import BertForMaskedLM
from zoo import (
    PATHS,
    SIDES,
    Case,
    assert_close,
    assert_same_gradients,
    assert_same_weights,
    gradients,
    load_strict,
    make_batch,
    make_targets,
)

from hf_ctxmodels import CtxSpanBertForPreTraining, CtxSpanBertModel, CtxSpanBertTokenizer
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.registry import FAMILIES

PRETRAINING = Case(FAMILIES["spanbert"], "AutoModelForPreTraining")
RELEASED_NAMES = {  # native name -> released name; released LayerNorms have gamma and beta
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


def reference_losses(model, batch, labels, boundary_labels):
    """Both loss terms, computed in loops over targets."""
    states, head = model.bert(**batch).last_hidden_state, model.sbo_head
    logits = model.mlm_head(states)
    mlm_losses, sbo_losses = [], []
    for row in range(len(labels)):
        for column in range(labels.shape[1]):
            if labels[row, column] != -100:
                mlm_losses.append(F.cross_entropy(logits[row, column], labels[row, column]))
            if boundary_labels[row, column] != -100:
                left = right = column
                while labels[row, left] != -100:
                    left -= 1
                while labels[row, right] != -100:
                    right += 1
                position = head.position_embeddings.weight[column - left - 1]
                states_and_position = torch.cat([states[row, left], states[row, right], position])
                hidden = head.first_norm(F.gelu(head.first_dense(states_and_position)))
                hidden = head.second_norm(F.gelu(head.second_dense(hidden)))
                sbo_losses.append(F.cross_entropy(head.decoder(hidden), boundary_labels[row, column]))
    return torch.stack(mlm_losses).mean(), torch.stack(sbo_losses).sum() / (len(sbo_losses) + 1)


@pytest.mark.parametrize("side", SIDES)
def test_loss_terms_match_reference(side):
    """On all attention paths, with and without the logits of all positions."""
    batch = make_batch(PRETRAINING, (20, 9, 1, 16, 20, 18), side=side)
    targets = make_targets(PRETRAINING, batch)
    boundary = targets["boundary_labels"] != -100
    assert (boundary[:, 1:] & boundary[:, :-1]).any(), "the batch has no span of two tokens"
    reference = PRETRAINING.model(**PATHS["eager"])
    mlm_loss, sbo_loss = reference_losses(reference, batch, targets["labels"], targets["boundary_labels"])
    expected_gradients = gradients(reference, mlm_loss + sbo_loss)
    for path, options in PATHS.items():
        for return_logits in (False, True):
            model = PRETRAINING.model(**options)
            outputs = model(**batch, **targets, return_logits=return_logits)
            label = f"on the {path} path"
            assert_close(outputs.mlm_loss, mlm_loss.detach(), f"mlm_loss {label}")
            assert_close(outputs.sbo_loss, sbo_loss.detach(), f"sbo_loss {label}")
            assert_same_gradients(gradients(model, outputs.loss), expected_gradients, where=label)


def test_packed_sequences_match_separate_sequences():
    model = PRETRAINING.model()
    ids = torch.randint(5, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    labels = torch.full_like(ids, -100)
    labels[:, 2:5], labels[1, 7] = ids[:, 2:5], ids[1, 7]
    separate = model(input_ids=ids, labels=labels, boundary_labels=labels)
    sequence_ids = torch.tensor([[1] * 9 + [2] * 9])
    packed = {"input_ids": ids.view(1, -1), "labels": labels.view(1, -1), "boundary_labels": labels.view(1, -1)}
    assert_close(model(**packed, sequence_ids=sequence_ids).loss, separate.loss)


def test_loss_without_boundary_labels_is_masked_lm():
    batch = make_batch(PRETRAINING)
    labels = make_targets(PRETRAINING, batch)["labels"]
    outputs = PRETRAINING.model()(**batch, labels=labels)
    assert outputs.sbo_loss is None
    assert outputs.metrics is None
    assert_close(outputs.loss.detach(), outputs.mlm_loss)


def test_invalid_boundary_targets():
    model, ids = PRETRAINING.model(), torch.full((1, 9), 7)
    with pytest.raises(CtxError, match="labels"):
        model(input_ids=ids, boundary_labels=ids)
    # outside the span, at both ends of the sequence, beyond the maximum
    for spans, target in (((2, 4), 6), ((0, 2), 1), ((6, 9), 7), ((1, 8), 4)):
        labels, boundary_labels = torch.full_like(ids, -100), torch.full_like(ids, -100)
        labels[0, slice(*spans)], boundary_labels[0, target] = 7, 7
        with pytest.raises(CtxError, match=rf"\[0, {target}\]"):
            model(input_ids=ids, labels=labels, boundary_labels=boundary_labels)


def test_released_checkpoint(tmp_path):
    """Including the span boundary head, which the encoder and the export do not have."""
    model = PRETRAINING.model(seed=4)
    fields = model.config.to_dict()
    model.export_reference(tmp_path)
    assert model.config.to_dict() == fields, "the export does not change the configuration"
    reference, batch = load_strict(BertForMaskedLM, tmp_path), make_batch(PRETRAINING)
    mask = batch["attention_mask"] == 1
    assert_close(reference(**batch).logits[mask], model(**batch).prediction_logits[mask])
    weights = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    head = model.sbo_head.state_dict()
    names = RELEASED_NAMES | {"decoder.weight": "decoder.weight"}
    released = {f"cls.pair_target_predictions.{released}": head[name].clone() for name, released in names.items()}
    options = {"max_pair_targets": model.config.max_pair_targets, "pair_position_size": model.config.pair_position_size}
    for prefix in ("", "decoder."):  # fairseq's checkpoints have the prefix "decoder."
        renamed_weights = {f"{prefix}{name}": tensor for name, tensor in (weights | released).items()}
        save_file(renamed_weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        assert_same_weights(load_strict(CtxSpanBertForPreTraining, tmp_path, **options), model)
        encoder, report = CtxSpanBertModel.from_pretrained(tmp_path, output_loading_info=True)
        assert not report["unexpected_keys"]
        assert torch.equal(encoder.embeddings.word_embeddings.weight, model.bert.embeddings.word_embeddings.weight)


def test_tokenizer_is_cased():
    tokenizer = CtxSpanBertTokenizer.train(["A cat sat on A mat"] * 3, vocab_size=40)
    assert "A" in tokenizer.tokenize("A cat")
    assert not CtxSpanBertTokenizer(vocab=tokenizer.get_vocab()).do_lower_case
