"""StructBERT: terms of the pretraining loss, loading of BERT checkpoints, and export."""

import torch
from torch.nn import functional as F
from transformers import BertForMaskedLM, BertForPreTraining
from zoo import PATHS, Case, assert_close, make_batch, make_targets

from hf_ctxmodels import CtxStructBertForPreTraining
from hf_ctxmodels.registry import FAMILIES

PRETRAINING = Case(FAMILIES["structbert"], "AutoModelForPreTraining")


def test_loss_terms_are_means_over_targets():
    batch = make_batch(PRETRAINING)
    targets = make_targets(PRETRAINING, batch)
    targets["sentence_label"] = torch.tensor([2, 0, 1, 2])
    for path, options in PATHS.items():
        model = PRETRAINING.model(**options)
        logits, outputs = model(**batch), model(**batch, **targets)
        assert logits.sentence_logits.shape == (4, 3)
        token_logits = logits.prediction_logits.flatten(0, 1)
        terms = {"mlm_loss": ("labels", token_logits), "shuffle_loss": ("shuffle_labels", token_logits)}
        terms |= {"sentence_loss": ("sentence_label", logits.sentence_logits)}
        for name, (target, term_logits) in terms.items():
            expected = F.cross_entropy(term_logits, targets[target].flatten())
            assert_close(outputs[name], expected.detach(), f"{name} by the {path} path")
            assert_close(model(**batch, **{target: targets[target]}).loss, expected, f"{name} alone")


def test_loading_and_export_of_bert_checkpoint(tmp_path):
    """BERT's next-sentence classifier is neither loaded nor exported."""
    reference = BertForPreTraining(PRETRAINING.reference_config()).eval()
    reference.save_pretrained(tmp_path)
    model, report = CtxStructBertForPreTraining.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["missing_keys"]) == {"sentence_head.weight", "sentence_head.bias"}
    assert not report["unexpected_keys"]
    batch = make_batch(PRETRAINING)
    expected = reference(**batch).prediction_logits
    mask = batch["attention_mask"] == 1
    assert_close(model.eval()(**batch).prediction_logits[mask], expected[mask])
    model.export_reference(tmp_path / "export")
    exported, report = BertForMaskedLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not report["missing_keys"]
    assert all("pooler" in name for name in report["unexpected_keys"])
    assert_close(exported.eval()(**batch).logits[mask], expected[mask])
