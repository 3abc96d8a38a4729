"""The table of scripts/learning.py: which numbers it judges, and by what."""

import pytest
from benchmarks.learning import Claim, Detection, Transfer, pretraining_claims, report, transfer_claims

from hf_ctxmodels.training.metrics.summary import TrainingSummary


def summary(**metrics: float) -> TrainingSummary:
    fixed = {"task": "pretraining", "model_class": "CtxNewtForPreTraining", "model_type": "ctx-newt", "dataset": "demo"}
    return TrainingSummary(**fixed, seed=0, parameters=12345, steps=10, global_batch_size=8, metrics=metrics)


@pytest.mark.parametrize(
    ("metrics", "reached"),
    [
        ({"eval_loss": 4.9, "baseline_loss": 6.0}, [True]),
        ({"eval_loss": 5.1, "baseline_loss": 6.0}, [False]),
        # A classifier's loss is shown, its accuracy is judged.
        (
            {
                "eval_pair_loss": 0.7,
                "baseline_pair_loss": 0.69,
                "eval_pair_accuracy": 0.61,
                "baseline_pair_accuracy": 0.5,
            },
            [True, True],
        ),
        ({"eval_pair_accuracy": 0.6, "baseline_pair_accuracy": 0.5}, [False]),
        ({"eval_pair_accuracy": 0.7, "baseline_pair_accuracy": 0.75}, [False]),
        ({"eval_pair_accuracy": 0.7500001, "baseline_pair_accuracy": 0.75}, [False]),
        ({"eval_replaced_f1": 0.2, "baseline_replaced_f1": 0.1, "eval_replaced_precision": 0.5}, [True]),
        ({"eval_replaced_f1": 0.1, "baseline_replaced_f1": 0.1}, [False]),
    ],
)
def test_what_must_be_beaten_follows_from_the_kind_of_the_number(metrics, reached):
    claims = pretraining_claims(summary(**metrics))
    assert [claim.reached for claim in claims] == reached
    assert len([claim for claim in claims if claim.demanded]) == 1


def test_a_detector_must_also_beat_the_one_that_reads_no_context():
    metrics = {"eval_replaced_f1": 0.0, "baseline_replaced_f1": 0.2}
    (reached,) = pretraining_claims(summary(**metrics), Detection(by_model=0.25, by_token=0.24))
    assert (reached.value, reached.baseline, reached.reached) == ("0.250", "0.240", True)
    (missed,) = pretraining_claims(summary(**metrics), Detection(by_model=0.25, by_token=0.26))
    assert (missed.baseline, missed.reached) == ("0.260", False)
    assert not pretraining_claims(summary(**metrics), Detection(by_model=0.2, by_token=0.1))[0].reached


def transfer(*accuracies: float) -> Transfer:
    return Transfer(1e-3, {3e-4: 0.7, 1e-3: 0.75}, accuracies)


def test_transfer_is_reached_when_every_seed_is_better():
    assert transfer_claims("SST-2", transfer(0.8, 0.79), transfer(0.7, 0.78))[1].reached
    tried, overlapping = transfer_claims("SST-2", transfer(0.8, 0.77), transfer(0.7, 0.78))
    assert (tried.name, tried.value) == ("SST-2 dev accuracy at the rates 0.0003, 0.001", "0.700 0.750")
    assert not tried.demanded
    assert not overlapping.reached
    assert (overlapping.value, overlapping.baseline) == (
        "0.785 (0.800 0.770) at 0.001",
        "0.740 (0.700 0.780) at 0.001 from random weights",
    )


def test_the_report_says_what_was_missed():
    claims = [Claim("mlm loss", "5", "6", "lower", False), Claim("order loss", "1", "2")]
    text = report(claims, summary(), ["hf-ctxmodels pretrain"], "newt_learning.png")
    assert "| mlm loss | 5 | 6 | lower | **no** |\n| order loss | 1 | 2 | - | - |" in text
    assert "```bash\nhf-ctxmodels pretrain\n```" in text
    assert "![Losses by step](newt_learning.png)" in text
