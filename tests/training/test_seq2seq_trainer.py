"""Every encoder-decoder under transformers' own Seq2SeqTrainer, untouched: it trains, and evaluates what is written."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import EvalPrediction, Seq2SeqTrainer, Seq2SeqTrainingArguments
from zoo import HEADS, Case, make_batch, make_targets

WRITING = [case for case in HEADS if case.auto_name == "AutoModelForSeq2SeqLM" and case.config().is_encoder_decoder]
LONGEST = 6
KEPT = ("input_ids", "attention_mask", "token_type_ids", "labels", "target_languages")


@pytest.mark.parametrize("case", WRITING, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_trains_and_evaluates_what_it_writes(case: Case, tmp_path) -> None:
    model, batch = case.model(), make_batch(case, (5, 3, 4, 5, 2, 3, 4, 5, 5, 3, 2, 4))
    batch = batch | make_targets(case, batch)
    batch = {name: tensor for name, tensor in batch.items() if name in KEPT}
    rows = [{name: tensor[row].tolist() for name, tensor in batch.items()} for row in range(12)]
    seen: list[EvalPrediction] = []

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        seen.append(prediction)
        return {"rows": float(len(prediction.predictions))}

    arguments = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=5,
        per_device_eval_batch_size=4,
        learning_rate=5e-3,
        predict_with_generate=True,
        generation_max_length=LONGEST,
        generation_num_beams=2,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    data = Dataset.from_list(rows)
    trainer = Seq2SeqTrainer(model, arguments, train_dataset=data, eval_dataset=data, compute_metrics=compute_metrics)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    trainer.train()
    assert any(not torch.equal(before[name], each) for name, each in model.named_parameters())
    assert trainer.evaluate()["eval_rows"] == 12
    steps = batch["labels"].shape[1]
    np.testing.assert_array_equal(seen[0].label_ids[:, :steps], batch["labels"].numpy())
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    settings = {"max_length": LONGEST, "num_beams": 2}
    with torch.no_grad():
        written = model.eval().generate(**inputs, **settings)
        split = [{name: each[rows] for name, each in batch.items()} for rows in (range(4), range(4, 8), range(8, 12))]
        losses = [model(**part).loss.item() / 3 for part in split]
    assert len(written.unique()) > 2, "too dull a text to tell anything"
    width = written.shape[1]
    np.testing.assert_array_equal(seen[0].predictions[:, :width], written.numpy())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(sum(losses), abs=1e-5)
