"""Plans: reading, errors, excluded families, digests."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from commands import save, tiny_pair

from hf_ctxmodels import CtxBertTokenizer, CtxError
from hf_ctxmodels.comparison.measures import MeasuredCheckpoint, PretrainingLoss
from hf_ctxmodels.comparison.plan import exclusion_reason, read_plan, tokenizer_class
from hf_ctxmodels.comparison.results import Scores, contrast_tables, result_table, write_results
from hf_ctxmodels.comparison.runner import Comparison, Record, measure_digest
from hf_ctxmodels.comparison.sizing import RunSize, checkpoint_steps, measure_size
from hf_ctxmodels.core.command_line import packaged_folder
from hf_ctxmodels.downstream.finetuning.forgetting import PretrainingEvaluation
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.training.summary import TrainingSummary

PLAN = """
dataset: text.txt
vocab_size: 300
budget: {words: 1000}
seeds: [0, 1]
pretraining: {config: tiny, max_length: 32}
families: [bert, glove]
variants:
  bert-mlm: {family: bert, objective: mlm}
measures:
  zorro: {kind: pairs, files: pairs*.txt}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("a cat sat on a mat\na dog ran\n" * 20)
    (tmp_path / "pairs.txt").write_text("a cat sit .\na cat sits .\n")
    return tmp_path


def read_plan_text(folder: Path, text: str = PLAN):
    (folder / "plan.yaml").write_text(text)
    return read_plan(folder / "plan.yaml", folder)


def test_runs_are_ordered_by_seed(folder):
    plan = read_plan_text(folder)
    runs = [(run.seed, run.budget, run.variant.name, run.variant.objective) for run in plan.runs()]
    variants = [("bert", "mlm+nsp"), ("glove", "cooccurrence"), ("bert-mlm", "mlm")]
    assert runs == [(seed, "words", *variant) for seed in (0, 1) for variant in variants]
    assert plan.dataset == [str(folder / "text.txt")]
    assert plan.measures[0].files == [str(folder / "pairs.txt")]


def test_config_options_of_plan_and_variant_are_merged(folder):
    text = PLAN.replace("max_length: 32", "config_options: {num_hidden_layers: 3, hidden_size: 32}, max_length: 32")
    plan = read_plan_text(folder, text.replace("objective: mlm", "max_length: 16, config_options: {hidden_size: 64}"))
    recipes = {variant.name: variant.recipe for variant in plan.variants}
    assert recipes["bert"]["config_options"] == {"num_hidden_layers": "3", "hidden_size": "32"}
    assert recipes["bert-mlm"]["config_options"] == {"num_hidden_layers": "3", "hidden_size": "64"}
    assert [recipe["max_length"] for recipe in recipes.values()] == ["32", "32", "16"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("families: [bert, glove]", "families: [bart, berta]", "Unknown family 'berta'.*did you mean bert"),
        ("families: [bert, glove]", "families: [[bert, glove]]", "Expected a list of families"),
        ("objective: mlm", "objective: clm", "no objective 'clm'"),
        ("  bert-mlm:", "  bert-mlm: {family: glove}\n  bert-mlm:", "'bert-mlm' occurs twice"),
        ("family: bert, objective: mlm", "family: mass, objective: masked-translation", "needs translations"),
        ("family: bert, objective: mlm", "family: cvt", "no objective"),
        ("family: bert, objective: mlm", "family: bert, max_steps: 3", "max_steps is determined by the plan"),
        ("family: bert, objective: mlm", "family: bert, vocab_size: many", "invalid int value 'many'"),
        ("family: bert, objective: mlm", "family: bert, recipe: bert_lerning", "did you mean bert_learning"),
        ("max_length: 32", "max_lenth: 32", r"Unknown key 'max_lenth'.*, max_lenth\n.*did you mean max_length"),
        ("max_length: 32", "learning_rate: -1", "learning_rate"),
        ("config: tiny", "config: mini", "The family glove has no size 'mini'"),
        ("kind: pairs", "kind: pair", "no known kind: 'pair'.*did you mean pairs"),
        ("kind: pairs", "kind: [pairs]", "no known kind"),
        ("files: pairs*.txt", "files: []", "0 files, expected files"),
        ("files: pairs*.txt", "files: pairs.txt, max_pairs: [3]", r"max_pairs: invalid value \['3'\]"),
        ("family: bert, objective: mlm", "family: [bert]", "Unknown family"),
        ("family: bert, objective: mlm", "family: bert, vocab_size: [300]", "invalid int value"),
        ("family: bert, objective: mlm", "family: bert, objective: [clm]", "no objective 'clm'"),
        ("max_length: 32", "max_length: [[32]]", r"Expected a value of max_length, got \[\['32'\]\]"),
        ("max_length: 32", "config_options: {hidden_size: [[32]]}", "Expected a value of config_options"),
        ("files: pairs*.txt", "files: missing*.txt", "There is no file"),
        ("  zorro:", "  zorro[1]:", r"'zorro\[1\]' is not a valid name of a measure"),
        ("  zorro:", "  cost:", "'cost' is the name of the costs of training"),
        ("files: pairs*.txt", "max_pairs: 3", "lacks files"),
        (
            "kind: pairs, files: pairs*.txt",
            "kind: finetune, train_file: pairs.txt, validation_file: pairs.txt, flags: 3",
            "flags '3' are not a mapping",
        ),
        (
            "kind: pairs, files: pairs*.txt",
            "kind: finetune, train_file: pairs.txt, validation_file: pairs.txt, flags: {seed: 3}",
            "seed is determined by the plan",
        ),
        (
            "kind: pairs, files: pairs*.txt",
            "kind: pretraining, text: pairs.txt, options: a",
            "options 'a' are not a map",
        ),
        (
            "kind: pairs, files: pairs*.txt",
            "kind: finetune, train_file: [pairs.txt, text.txt], validation_file: pairs.txt",
            "train_file: 2 files, expected 1",
        ),
        ("files: pairs*.txt", "files: pairs.txt, max_pairs: many", "max_pairs: invalid"),
        ("files: pairs*.txt", "files: pairs.txt, pairs: 3", "no option 'pairs'"),
        ("{words: 1000}", "{steps: 1000}", "Unknown key 'steps' in the budget.*flops, minutes, words"),
        ("{words: 1000}", "{words: -3}", "The budget of words is -3"),
        ("{words: 1000}", "{}", "The budget is empty"),
        ("budget: {words: 1000}", "checkpoints: 0", "lacks budget"),
        ("vocab_size: 300", "vocab_size: 300\ncheckpoints: 0", "1 to 20 checkpoints, got 0"),
        ("vocab_size: 300", "vocab_size: 300\naccelerate: {config_file: gpus.yaml}", "There is no file gpus.yaml"),
        ("vocab_size: 300", "vocab_size: 300\naccelerate: 2", "accelerate is not a mapping"),
        ("vocab_size: 300", "vocab_size: 300\naccelerate: {num_processes: [2]}", "accelerate is not a mapping of"),
        ("[0, 1]", "[0, 0]", "Expected different seeds"),
        ("[0, 1]", "[0, 1]\ncontrasts: {vectors: [bert, glov]}", "Expected a list of two variants, got .*glov"),
        ("[0, 1]", "[0, 1]\ncontrasts: {vectors: bert}", "Expected a list of two variants, got bert"),
        ("[0, 1]", "[0, 1]\ncontrasts: {vectors: [bert, [glove]]}", "Expected a list of two variants"),
        ("[0, 1]", "[0, a]", "Expected different seeds"),
        ("text.txt", "texts/*.txt", "texts"),
    ],
)
def test_invalid_plan_raises(folder, old, new, message):
    assert old in PLAN
    with pytest.raises(CtxError, match=f"(?s){message}") as error:
        read_plan_text(folder, PLAN.replace(old, new))
    assert error.value.location is not None


def test_recursive_pattern_of_files(folder):
    (folder / "nested" / "b").mkdir(parents=True)
    for name in ("nested/a.txt", "nested/b/c.txt"):
        (folder / name).write_text("a cat sit .\na cat sits .\n")
    text = PLAN.replace("pairs*.txt", '"nested/**/*.txt"').replace("dataset: text.txt", 'dataset: "nested/**/*.txt"')
    plan = read_plan_text(folder, text)
    assert plan.measures[0].files == [str(folder / "nested" / name) for name in ("a.txt", "b/c.txt")]
    assert plan.dataset == [str(folder / "nested/**/*.txt")]


def test_datasets_with_options(folder):
    """Names of configurations may contain a dot; parts of splits are no patterns; directories are in the folder."""
    (folder / "rows").mkdir()
    for source in ("org/name:config=20231101.en", "org/name:split=train[:10%]", "rows:split=train"):
        (dataset,) = read_plan_text(folder, PLAN.replace("dataset: text.txt", f'dataset: "{source}"')).dataset
        assert dataset == (f"{folder}/{source}" if source.startswith("rows") else source)


def test_variant_has_a_vocabulary_size(folder):
    plan = read_plan_text(folder, PLAN.replace("objective: mlm", "vocab_size: 200"))
    assert [plan.tokenizer_size(variant) for variant in plan.variants] == [300, 300, 200]
    comparison = Comparison(plan, folder / "output")
    assert len({comparison.tokenizer_folder(variant) for variant in plan.variants}) == 3


def test_contrasts_are_differences_of_equal_seeds(folder):
    text = PLAN.replace("[0, 1]", "[0, 1, 2]\ncontrasts: {objectives: [bert-mlm, bert], vectors: [bert, glove]}")
    scores = {"bert-mlm": (0.75, 0.5, 1.0), "bert": (0.5, 0.375, 0.5), "glove": (0.5, 0.25)}
    records = [
        Record(variant, None, "words", seed, step, None, None, "zorro", "accuracy", value if step else 0.0, "")
        for step in (9, 0)
        for variant, values in scores.items()
        for seed, value in enumerate(values)
    ]
    (table,) = contrast_tables(read_plan_text(folder, text), "differences", {"zorro": ["accuracy"]}, records)
    assert dict(zip(table.rows, table.cells, strict=True)) == {
        "objectives: bert-mlm - bert": ["+0.292 [+0.125, +0.500]*"],
        "vectors: bert - glove": ["+0.062 [+0.000, +0.125]"],
    }
    # the perplexity of the last checkpoint of a run is missing, or the run is not measured yet
    records = [record for record in records if (record.variant, record.seed, record.step) != ("bert", 1, 9)]
    records.append(Record("bert", None, "words", 1, 9, None, None, "cost", "words", 1.0, ""))
    (table,) = contrast_tables(read_plan_text(folder, text), "differences", {"zorro": ["accuracy"]}, records)
    assert table.cells == [["+0.375 [+0.250, +0.500]"], ["+0.000"]], "an earlier checkpoint is not compared"


def test_most_frequent_senses_are_a_baseline(folder):
    values = {"bert": (0.5, 0.75), "bert-mlm": (0.25, 0.75)}
    records = [
        Record(variant, variant, "words", 0, 9, None, None, "zorro", metric, value, "")
        for variant, numbers in values.items()
        for metric, value in zip(("accuracy", "most_frequent"), numbers)
    ]
    metrics, none = {"zorro": ["accuracy"]}, Scores([])
    table = result_table(read_plan_text(folder), "title", metrics, list(values), Scores(records), none, "")
    cells = dict(zip(table.rows, table.cells, strict=True))
    assert table.columns == ["zorro"]
    assert (cells["bert"], cells["bert-mlm"], cells["most_frequent"]) == ([0.5], [0.25], [0.75])


FINETUNE = "kind: finetune, train_file: train.tsv, validation_file: train.tsv"


@pytest.mark.parametrize(
    ("measure", "message"),
    [
        ("kind: pairs, files: pairs.txt", None),
        (FINETUNE, None),
        (f"{FINETUNE}, features: true, metric: f1_macro, flags: {{num_train_epochs: 2}}", None),
        (f"{FINETUNE}, task: seq2seq, metric: exact_match_normalized, flags: {{text_columns: text, "
         "label_column: label, metrics: exact_match}", None),
        (f"{FINETUNE}, flags: {{epochs: 2}}", "Unknown key 'epochs'.*did you mean num_train_epochs"),
        (f"{FINETUNE}, flags: {{num_train_epochs: many}}", "num_train_epochs.*see `hf-ctxmodels finetune sequence"),
        (f"{FINETUNE}, flags: {{text_columns: sentence}}", "No column 'sentence'.*'text', 'label'"),
        (f"{FINETUNE}, flags: {{unlabeled_file: missing.tsv}}", "missing.tsv"),
        (f"{FINETUNE}, flags: {{adapter: houlsby, reinit: 1}}", "cannot be combined"),
        (f"{FINETUNE}, metric: acuracy", "no metric 'acuracy'.*did you mean accuracy"),
        (f"{FINETUNE}, metric: f1, task: regression", "'a' is not a finite number"),
        ("kind: similarity, file: train.tsv", "columns"),
        ("kind: similarity, file: train.tsv, columns: [text, text, score]", "No column 'score'"),
        ("kind: probe, task: poss, train_file: t.conllu, dev_file: t.conllu, test_file: t.conllu", "did you mean pos"),
        ("kind: probe, train_file: t.conllu, dev_file: t.conllu, test_file: train.tsv", "train.tsv"),
        ("kind: senses, semcor: train.tsv", "train.tsv"),
        ("kind: pairs, files: train.tsv", "train.tsv"),
        ("kind: pairs, files: accuracy.txt", "phenomenon is named 'accuracy'"),
        ("kind: pretraining, text: text.txt, options: {sentence_task: order}", None),
        ("kind: pretraining, text: empty.txt", "empty.txt"),
        ("kind: pretraining, text: text.txt, options: {sentence_tsk: order}", "did you mean sentence_task"),
    ],
)  # fmt: skip
def test_measures_are_checked_before_training(folder, measure, message):
    (folder / "train.tsv").write_text("text\tlabel\na cat\ta\na dog\tb\na mat\ta\n")
    (folder / "empty.txt").write_text("")
    (folder / "accuracy.txt").write_text("a cat sit .\na cat sits .\n")
    (folder / "t.conllu").write_text("1\tcat\tcat\tNOUN\t_\t_\t0\troot\t_\t_\n\n")
    plan = read_plan_text(folder, PLAN.replace("kind: pairs, files: pairs*.txt", measure))
    if message is None:
        plan.check_measures()
        return
    with pytest.raises(CtxError, match=f"(?s){message}") as error:
        plan.check_measures()
    assert error.value.location.startswith("measures.zorro")


def test_non_finite_metrics_are_excluded(folder):
    """They are named below the table and do not change the metric of the table."""
    plan = read_plan_text(folder, PLAN.replace("[0, 1]", "[0]"))
    comparison = Comparison(plan, folder / "output")
    size = RunSize(100, words=1000, examples=50, batch_size=5, flops_per_step=2e6, seconds_per_step=1, timed_seconds=1)
    values = {"bert": float("inf"), "glove": float("nan"), "bert-mlm": 0.75}
    for run in comparison.selected_runs():
        size.save(comparison.size_file(run.variant))
        file = comparison.measure_file(run, plan.measures[0], 10)
        file.parent.mkdir(parents=True)
        content = {"values": {"accuracy": values[run.variant.name], "first": 0.5}, "method": "", "seconds": 1.0}
        file.write_text(json.dumps(content))
        summary_fields = dict.fromkeys(("seed", "parameters", "global_batch_size", "max_length"), 1)
        TrainingSummary(task="pretraining", model_class="", model_type="", dataset="", steps=10, **summary_fields).save(
            comparison.run_folder(run)
        )
    (result,) = write_results(comparison)
    table = result.tables[0]
    assert dict(zip(table.rows, table.cells, strict=True))["bert-mlm"] == [0.75]
    assert dict(zip(table.rows, table.cells, strict=True))["bert"] == [None]
    assert (
        "not a number, and left out: zorro, accuracy of bert (seed 0, step 10); zorro, accuracy of glove" in table.note
    )
    records = [json.loads(line) for line in (folder / "output" / "results.jsonl").read_text().splitlines()]
    assert [record["value"] for record in records if record["metric"] == "accuracy"] == [0.75]


def test_all_families_with_raw_text_objectives(folder):
    """A family is included if its first objective needs only raw text; new families need no change here."""
    plan = read_plan_text(folder, PLAN.replace("[bert, glove]", "all"))
    names = {variant.name for variant in plan.variants}
    assert names == {"bert-mlm", *FAMILIES} - {*plan.excluded}
    assert {*plan.excluded} == {name for name, spec in FAMILIES.items() if exclusion_reason(spec) is not None}
    assert {"cove", "infersent", "laser"} <= {*plan.excluded}


def test_families_share_tokenizers(folder):
    plan = read_plan_text(folder, PLAN.replace("[bert, glove]", "all"))
    kinds = {variant.name: variant.tokenizer_kind for variant in plan.variants}
    assert kinds["electra"] == kinds["bert-mlm"] == kinds["bert"] == "bert"
    assert kinds["glove"] == kinds["word2vec"] != kinds["elmo"]
    for variant in plan.variants:  # the ids of special tokens do not depend on the family
        shared_tokenizer = FAMILIES[variant.tokenizer_kind].tokenizer
        assert getattr(shared_tokenizer, "defaults", None) == getattr(variant.spec.tokenizer, "defaults", None)


def test_overridden_training_makes_another_tokenizer():
    class Renamed(CtxBertTokenizer):
        pass

    class Retrained(CtxBertTokenizer):
        def train(self): ...

    bert = FAMILIES["bert"]
    assert tokenizer_class(replace(bert, tokenizer=Renamed)) is tokenizer_class(bert)
    assert tokenizer_class(replace(bert, tokenizer=Retrained)) is Retrained


def test_run_digest_depends_on_settings_and_data(folder):
    """Only the settings and data of a run change its digest."""

    def digests(text: str = PLAN):
        return {(run.variant.name, run.seed): run.digest for run in read_plan_text(folder, text).runs()}

    original = digests()
    assert len({*original.values()}) == len(original)
    for old, new in (
        ("[0, 1]", "[0, 1, 2]"),
        ("families: [bert, glove]", "families: [bert, gpt2, glove]"),
        ("files: pairs*.txt", "files: pairs*.txt, max_pairs: 1"),
        ("objective: mlm}", "objective: mlm, learning_rate: 1e-3}"),
    ):
        modified = digests(PLAN.replace(old, new))
        changed_runs = {name for name, digest in original.items() if modified[name] != digest}
        assert changed_runs == ({("bert-mlm", 0), ("bert-mlm", 1)} if "learning_rate" in new else set())
    for old, new in (
        ("max_length: 32", "max_length: 16"),
        ("words: 1000", "words: 2000"),
        ("vocab_size: 300", "vocab_size: 400"),
        ("vocab_size: 300", "vocab_size: 300\nvalidation_fraction: 0.1"),
        ("vocab_size: 300", "vocab_size: 300\ncheckpoints: 2"),
    ):
        assert not {*original.values()} & {*digests(PLAN.replace(old, new)).values()}
    (folder / "text.txt").write_text("another text\n" * 20)
    assert not {*original.values()} & {*digests().values()}


def test_digests_depend_on_files_of_the_recipe(folder):
    config, units = folder / "config.json", folder / "units.txt"
    plan = PLAN.replace("config: tiny", f"config: {config}").replace("objective: mlm", f"objective: mlm:units={units}")
    plan = plan.replace("family: bert,", "family: ernie,").replace("[bert, glove]", "[bert]")
    comparison = Comparison(read_plan_text(folder, plan), folder)

    def digests():
        sizes = [comparison.size_file(variant).name for variant in comparison.plan.variants]
        return [run.digest for run in comparison.plan.runs()], sizes

    config.write_text("{}")
    units.write_text("a cat\n")
    (bert, ernie, *_), (bert_size, ernie_size) = digests()
    units.write_text("a dog\n")
    (same_bert, changed_ernie, *_), (same_bert_size, changed_ernie_size) = digests()
    assert (same_bert, same_bert_size) == (bert, bert_size)
    assert changed_ernie != ernie
    assert changed_ernie_size != ernie_size
    config.write_text('{"num_hidden_layers": 3}')
    (changed_bert, *_), (changed_bert_size, _) = digests()
    assert changed_bert != bert
    assert changed_bert_size != bert_size


def test_selected_variants_and_seeds(folder):
    plan = read_plan_text(folder, PLAN)
    runs = Comparison(plan, folder, only=["bert"], seeds=[1]).selected_runs()
    assert {(run.variant.name, run.seed) for run in runs} == {("bert", 1)}
    with pytest.raises(CtxError, match="no seed 7"):
        Comparison(plan, folder, seeds=[0, 7])
    with pytest.raises(CtxError, match="no variant gpt2"):
        Comparison(plan, folder, only=["gpt2"])


def test_sizes_are_measured_per_family(folder):
    """Families with equal flags and equal tokenizers have separate sizes."""
    bert, electra = (
        Comparison(read_plan_text(folder, PLAN.replace("family: bert, objective: mlm", f"family: {family}")), folder)
        for family in ("bert", "electra")
    )
    assert bert.tokenizer_folder(bert.plan.variants[-1]) == electra.tokenizer_folder(electra.plan.variants[-1])
    assert bert.size_file(bert.plan.variants[-1]) != electra.size_file(electra.plan.variants[-1])


def test_measure_digest_depends_on_files(folder):
    (measure,) = read_plan_text(folder).measures
    digest = measure_digest(measure)
    assert measure_digest(read_plan_text(folder).measures[0]) == digest
    (folder / "pairs.txt").write_text("a cat sit .\na cat sat .\n")
    assert measure_digest(measure) != digest


def test_steps_of_budgets_and_checkpoints():
    size = RunSize(
        100, words=1000, examples=50, batch_size=5, flops_per_step=2e6, seconds_per_step=0.5, timed_seconds=1
    )
    assert size.words_per_step == 100
    assert [size.steps(*budget) for budget in (("words", 1000), ("flops", 8e6), ("minutes", 2))] == [10, 4, 240]
    assert size.save_steps * size.seconds_per_step < 60
    assert checkpoint_steps(100, 3) == [0, 25, 50, 100]
    assert checkpoint_steps(3, 5) == [0, 1, 2, 3]


def test_measure_size(folder, capsys):
    """The log of the trial run (one million steps) is hidden."""
    (folder / "text.txt").write_text("\n\n".join(["a cat sat on a mat\na dog ran"] * 40))
    plan = read_plan_text(folder, PLAN.replace("max_length: 32", "max_length: 32, dataloader_workers: 0"))
    FAMILIES["bert"].tokenizer.train(["a cat sat on a mat a dog ran"] * 9, vocab_size=60).save_pretrained(folder / "t")
    size = measure_size(plan, plan.variants[-1], folder / "t", seconds=0.2)
    assert (size.words, size.timed_seconds) == (39 * 9, 0.2)
    assert min(size.parameters, size.flops_per_step, size.seconds_per_step) > 0
    assert "of 1,000,000" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=pytest.mark.slow if path.stem == "babylm" else ())
        for path in sorted(packaged_folder("comparisons").glob("*.yaml"))
    ],
)
def test_packaged_plans(path, shared_data, tmp_path):
    for folder in shared_data.iterdir():
        (tmp_path / folder.name).symlink_to(folder)
    (tmp_path / "babylm").mkdir()
    (tmp_path / "babylm" / "part.train").write_text("a cat sat\n")
    (tmp_path / "titles").mkdir()
    for split in ("train", "validation"):
        (tmp_path / "titles" / f"{split}.jsonl").write_text('{"source": "a cat sat", "target": "cat"}\n')
    plan = read_plan(path.stem, tmp_path)
    if "families: all" in path.read_text():
        assert {variant.family for variant in plan.variants} | {*plan.excluded} == {*FAMILIES}
    else:
        assert len({str(variant.recipe) for variant in plan.variants}) == len(plan.variants) > 2
    for measure in plan.measures:
        if measure.kind in ("pretraining", "finetune"):
            measure.check()


def test_pretraining_measure_without_sentence_task(folder, capsys):
    texts = ["a cat sat on a mat", "a dog ran home"]
    save(folder / "albert", *tiny_pair("albert", "AutoModelForPreTraining", texts))
    (folder / "pairs.txt").write_text("\n\n".join(["\n".join(texts * 2)] * 8))
    options = {"name": "order", "text": [str(folder / "pairs.txt")], "max_length": 16}
    checkpoint = MeasuredCheckpoint(folder / "albert", folder, 0, [])
    evaluation = PretrainingEvaluation.open(
        str(folder / "albert"), str(folder / "pairs.txt"), max_length=16, options={"sentence_task": "order"}
    )
    expected = evaluation.loss(64)
    measure = PretrainingLoss(**options, options={"sentence_task": "order"}, metric="sentence_order_accuracy")
    values = measure.evaluate(checkpoint).values
    assert next(iter(values)) == "sentence_order_accuracy"
    assert values == {name.removeprefix("eval_"): value for name, value in expected.items()}
    no_task = PretrainingLoss(**options, options={"sentence_task": "none"}, metric="sentence_order_accuracy")
    assert no_task.evaluate(checkpoint) is None
    assert "no sentence_order_accuracy" in capsys.readouterr().err
