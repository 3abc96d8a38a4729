"""UniLM: attention masks of segments in packed and padded batches; loading and export of BERT checkpoints."""

import pytest
import torch
from torch import Tensor
from transformers import BertForMaskedLM, BertModel
from zoo import PATHS, Case, assert_close, assert_same_gradients, assert_same_weights, gradients, load_strict

from hf_ctxmodels import CtxError, CtxUniLMForConditionalGeneration, CtxUniLMForMaskedLM, CtxUniLMModel
from hf_ctxmodels.registry import FAMILIES

ENCODER = Case(FAMILIES["unilm"], "AutoModel")
# segments of sequences; the last example packs three sequences
PAIR, FORWARD, BACKWARD, SEQ2SEQ = [0] * 3 + [1] * 4, [2] * 6, [3] * 5, [4] * 4 + [5] * 5
ROWS = [[PAIR], [FORWARD], [BACKWARD], [SEQ2SEQ], [[5, 5]], [BACKWARD, SEQ2SEQ, [0, 0]]]


def is_visible(types: list[int], query: int, key: int) -> bool:
    """The mask of section 2.3 of the paper for a pair of tokens."""
    if types[query] in (0, 1):
        return True
    if types[query] == 4:
        return types[key] == 4
    if types[query] == 3:
        return key >= query
    return types[key] == 4 or key <= query


def make_batch_and_mask(side: str) -> tuple[dict[str, Tensor], Tensor]:
    """The batch, and its explicit (batch, 1, length, length) mask."""
    width = max(sum(map(len, row)) for row in ROWS) + 2
    names = ("input_ids", "token_type_ids", "attention_mask", "sequence_ids", "position_ids")
    batch = {name: torch.zeros(len(ROWS), width, dtype=torch.long) for name in names}
    mask = torch.eye(width, dtype=torch.bool)[None, None].repeat(len(ROWS), 1, 1, 1)
    generator = torch.Generator().manual_seed(0)
    for row, sequences in enumerate(ROWS):
        start = width - sum(map(len, sequences)) if side == "left" else 0
        for number, types in enumerate(sequences):
            columns = slice(start, start + len(types))
            batch["input_ids"][row, columns] = torch.randint(5, 61, (len(types),), generator=generator)
            batch["token_type_ids"][row, columns] = torch.tensor(types)
            batch["attention_mask"][row, columns], batch["sequence_ids"][row, columns] = 1, number + 1
            batch["position_ids"][row, columns] = torch.arange(len(types))
            for query in range(len(types)):
                for key in range(len(types)):
                    mask[row, 0, start + query, start + key] = is_visible(types, query, key)
            start += len(types)
    return batch, mask


@pytest.mark.parametrize("side", ["right", "left"])
def test_segment_masks_match_4d_mask(side: str) -> None:
    """Outputs and gradients on all attention paths, with and without an output mask."""
    batch, mask = make_batch_and_mask(side)
    token_mask = batch["attention_mask"] == 1
    inputs = {name: batch[name] for name in ("input_ids", "token_type_ids", "position_ids")}
    reference = ENCODER.model(attention="eager", unpad=False)
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    expected = reference(**inputs, attention_mask=additive).last_hidden_state[token_mask]
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    expected_gradients = gradients(reference, (expected * weights).sum())
    output_mask = token_mask & (torch.rand(token_mask.shape, generator=torch.Generator().manual_seed(2)) < 0.4)
    for path, options in PATHS.items():
        model = ENCODER.model(**options)
        states = model(**batch).last_hidden_state[token_mask]
        assert_close(states, expected, path)
        assert_same_gradients(gradients(model, (states * weights).sum()), expected_gradients, 1e-4, path)
        outputs = model(**batch, output_mask=output_mask).last_hidden_state
        assert_close(outputs, expected[output_mask[token_mask]], f"output mask, {path}")
    unpacked_rows = {name: tensor[:5] for name, tensor in batch.items() if name not in ("sequence_ids", "position_ids")}
    if side == "right":
        assert_close(
            ENCODER.model()(**unpacked_rows).last_hidden_state[token_mask[:5]], expected[: int(token_mask[:5].sum())]
        )


def test_invalid_segments() -> None:
    ids = torch.full((1, 4), 7)
    for types, message in (
        ([2, 0, 0, 2], "segments 0, 1 and 4"),
        ([3, 3, 2, 3], "segment 3"),
        ([5, 4, 4, 5], "segments 0, 1 and 4"),
    ):
        with pytest.raises(CtxError, match=message):
            ENCODER.model()(ids, token_type_ids=torch.tensor([types]))


def test_loading_and_export_of_bert_checkpoint(tmp_path) -> None:
    reference = BertForMaskedLM(Case(FAMILIES["unilm"], "AutoModelForMaskedLM").reference_config()).eval()
    reference.save_pretrained(tmp_path / "bert")
    model = load_strict(CtxUniLMForConditionalGeneration, tmp_path / "bert")
    segments = reference.bert.embeddings.token_type_embeddings.weight
    assert torch.equal(model.bert.embeddings.token_type_embeddings.weight, segments[[0, 1, 0, 0, 0, 1]])
    model.export_reference(tmp_path / "same")
    exported = BertForMaskedLM.from_pretrained(tmp_path / "same")
    assert exported.config.type_vocab_size == 2
    assert_same_weights(exported, reference)
    with torch.no_grad():
        model.bert.embeddings.token_type_embeddings.weight[4] += 1
    model.export_reference(tmp_path / "trained")
    trained = BertModel.from_pretrained(tmp_path / "trained")
    assert trained.embeddings.token_type_embeddings.weight.shape[0] == 6, "trained segments are exported"
    assert torch.equal(trained.embeddings.token_type_embeddings.weight[:2], segments)
    reloaded = CtxUniLMForMaskedLM.from_pretrained(tmp_path / "trained")
    assert reloaded.state_dict().keys() <= model.state_dict().keys()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in reloaded.state_dict().items())
    assert CtxUniLMModel.from_pretrained(tmp_path / "same").config.type_vocab_size == 6
    tokens = {"query_token_id": 7, "decoder_start_token_id": 8, "eos_token_id": 9}  # ids of a different vocabulary
    for name, number in tokens.items():
        setattr(model.config, name, number)
    model.export_reference(tmp_path / "tokens")
    BertForMaskedLM.from_pretrained(tmp_path / "tokens").save_pretrained(tmp_path / "resaved")
    config = CtxUniLMForConditionalGeneration.from_pretrained(tmp_path / "resaved").config
    assert {name: getattr(config, name) for name in tokens} == tokens
