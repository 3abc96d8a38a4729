"""All encoder-decoders with transformers' Seq2SeqTrainer."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from training_runs import trainer_arguments
from transformers import EvalPrediction, Seq2SeqTrainer, Seq2SeqTrainingArguments
from zoo import HEADS, Case, make_batch, make_targets

ENCODER_DECODERS = [
    case for case in HEADS if case.auto_name == "AutoModelForSeq2SeqLM" and case.config().is_encoder_decoder
]
LONGEST = 6
MODEL_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "labels", "target_languages")


@pytest.mark.parametrize("case", ENCODER_DECODERS, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_training_and_generation(case: Case, tmp_path) -> None:
    model, batch = case.model(), make_batch(case, (5, 3, 4, 5, 2, 3, 4, 5, 5, 3, 2, 4))
    batch = batch | make_targets(case, batch)
    batch = {name: tensor for name, tensor in batch.items() if name in MODEL_INPUTS}
    rows = [{name: tensor[row].tolist() for name, tensor in batch.items()} for row in range(12)]
    seen: list[EvalPrediction] = []

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        seen.append(prediction)
        return {"rows": float(len(prediction.predictions))}

    sizes = {"max_steps": 3, "per_device_train_batch_size": 5, "per_device_eval_batch_size": 4, "learning_rate": 5e-3}
    generation = {"predict_with_generate": True, "generation_max_length": LONGEST, "generation_num_beams": 2}
    arguments = trainer_arguments(tmp_path, Seq2SeqTrainingArguments, **sizes, **generation)
    data = Dataset.from_list(rows)
    trainer = Seq2SeqTrainer(model, arguments, train_dataset=data, eval_dataset=data, compute_metrics=compute_metrics)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    trainer.train()
    assert any(not torch.equal(before[name], weight) for name, weight in model.named_parameters())
    assert trainer.evaluate()["eval_rows"] == 12
    steps = batch["labels"].shape[1]
    np.testing.assert_array_equal(seen[0].label_ids[:, :steps], batch["labels"].numpy())
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    settings = {"max_length": LONGEST, "num_beams": 2}
    with torch.no_grad():
        generated = model.eval().generate(**inputs, **settings)
        split = [
            {name: tensor[rows] for name, tensor in batch.items()} for rows in (range(4), range(4, 8), range(8, 12))
        ]
        losses = [model(**inputs_of_rows).loss.item() / 3 for inputs_of_rows in split]
    assert len(generated.unique()) > 2, "the text has too few tokens for a comparison"
    width = generated.shape[1]
    np.testing.assert_array_equal(seen[0].predictions[:, :width], generated.numpy())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(sum(losses), abs=1e-5)
