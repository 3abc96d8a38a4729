"""Universal triggers: search against brute force and autograd, outcomes, transfer and the command."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers
from commands import command_output, save, save_summary, tiny_pair
from zoo import HEADS

from hf_ctxmodels import CtxError
from hf_ctxmodels.analysis.triggers.attacks import (
    AnswerAttack,
    ClassificationAttack,
    ContinuationAttack,
    class_words,
    measure_triggers,
    split_halves,
)
from hf_ctxmodels.analysis.triggers.search import TriggerOptions
from hf_ctxmodels.cli.analyze_triggers import TriggerArguments, open_attacks, read_examples
from hf_ctxmodels.core.devices import DeviceArguments
from hf_ctxmodels.downstream.tasks import QuestionAnswering, SequenceClassification, TaskArguments
from hf_ctxmodels.downstream.tasks.question_answering import Question
from hf_ctxmodels.downstream.tasks.sequence_classification import SequenceExample
from hf_ctxmodels.inference.prediction import Predictor

WORDS = [
    "one",
    "two",
    "dogs",
    "cats",
    "run",
    "sleep",
    "slowly",
    "the",
    "a",
    "of",
    "green",
    "stone",
    "river",
    "happy",
    "sad",
    "never",
]
TEXTS = ["one cat sleeps", "two dogs run slowly", "the green river", "a happy stone", "never two dogs", "sad cats"]
LABELS = ["bad", "good", "worse"]
QUESTIONS = [Question(str(i), "who runs", text, ((0, text.split()[0]),), "") for i, text in enumerate(TEXTS)]
PAIRS = [SequenceExample((text, TEXTS[-1 - i]), LABELS[i % 3], "") for i, text in enumerate(TEXTS)]
CASES = [
    case
    for case in HEADS
    if case.auto_name in ("AutoModelForSequenceClassification", "AutoModelForQuestionAnswering", "AutoModelForCausalLM")
    and not case.token_id_axes
    and str(case) not in ("xlnet-AutoModelForCausalLM",)
]


def make_attack(family: str, auto_class: str, seed: int = 0) -> tuple[Any, list[Any]]:
    """An attack on a tiny random model, and its examples."""
    fields = {"id2label": dict(enumerate(LABELS))} if "Sequence" in auto_class else {}
    model, tokenizer = tiny_pair(family, auto_class, [*TEXTS, *WORDS], seed=seed, initializer_range=0.5, **fields)
    arguments = TaskArguments(max_length=24, doc_stride=2)
    if auto_class == "AutoModelForCausalLM":
        return ContinuationAttack(model, tokenizer, 24), TEXTS
    if auto_class == "AutoModelForQuestionAnswering":
        return AnswerAttack(Predictor(QuestionAnswering(arguments), model, tokenizer), "happy"), QUESTIONS
    task = SequenceClassification(arguments)
    task.load_labels(model.config)
    return ClassificationAttack(Predictor(task, model, tokenizer)), PAIRS


def loss_of_text(attack: Any, examples: list[Any], trigger: list[int]) -> float:
    """Loss of the texts with the trigger inserted as text."""
    features = attack.features(examples, attack.trigger_text(trigger))
    with torch.no_grad():
        return float(attack.model(**attack.collator()(features)).loss)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_search_step_equals_brute_force_and_autograd(case: Any) -> None:
    check_step(*make_attack(case.family.name, case.auto_name))


def test_transformers_models() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    attack, examples = make_attack("bert", "AutoModelForSequenceClassification")
    fields = {"vocab_size": len(attack.tokenizer), "id2label": dict(enumerate(LABELS)), "initializer_range": 0.5}
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, **fields)).eval()
    check_step(ClassificationAttack(Predictor(attack.task, model, attack.tokenizer)), examples)
    attack, examples = make_attack("gpt2", "AutoModelForCausalLM")
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": len(attack.tokenizer)}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    check_step(ContinuationAttack(model, attack.tokenizer, 24), examples)


def check_step(attack: Any, examples: list[Any]) -> None:
    """A step finds the best token of the vocabulary; its gradient is the gradient of the embedding table."""
    search = attack.search(examples, TriggerOptions(length=1, candidates=1000), [])
    (batch,) = search.batches
    assert len(search.vocabulary) >= 10
    sample = slice(None, None, max(1, len(search.vocabulary) // 12))  # byte-level vocabularies are large
    search.vocabulary, search.table = search.vocabulary[sample], search.table[sample]
    losses = [loss_of_text(attack, examples, [token]) for token in [*search.vocabulary, *search.start]]
    step = search.step(batch, search.start)
    assert search.sign * loss_of_text(attack, examples, step) == pytest.approx(max(search.sign * np.array(losses)))
    if not isinstance(attack, ContinuationAttack):  # its output layer may be tied to the table
        unused = next(token for token in search.vocabulary if not (batch.inputs["input_ids"] == token).any())
        if not isinstance(search.embeddings, torch.nn.Embedding):  # adaptive embeddings have several tables
            return
        weight = search.embeddings.weight.requires_grad_()
        attack.model(**batch.with_trigger([unused])).loss.backward()
        gradient = search.gradient(batch, [unused])[0]
        assert gradient.abs().max() > 1e-6
        torch.testing.assert_close(gradient, weight.grad[unused], rtol=1e-3, atol=1e-6)


def test_vocabulary_and_beam_search() -> None:
    """Special, unused, continuation and excluded tokens are not candidates; a wider beam is at least as good."""
    attack, examples = make_attack("bert", "AutoModelForSequenceClassification")
    options = [TriggerOptions(length=3, candidates=8, beam_size=size, epochs=1) for size in (1, 4)]
    searches = [attack.search(examples, option, ["dogs"]) for option in options]
    words = attack.tokenizer.convert_ids_to_tokens(searches[0].vocabulary)
    assert not any(word.startswith(("##", "[")) or word == "dogs" for word in words)
    assert {"cats", "stone"} <= set(words)
    losses = []
    for search in searches:
        (batch,) = search.batches
        losses += search.losses([batch.with_trigger(search.step(batch, search.start))])
    start = searches[0].mean_loss(searches[0].start)
    assert start < losses[0] <= losses[1]
    trigger = searches[0].run()
    assert searches[0].mean_loss(trigger) == pytest.approx(loss_of_text(attack, examples, trigger), rel=1e-5)
    assert searches[0].mean_loss(trigger) > start


def test_class_words_and_errors() -> None:
    rows = [("the good, film", "1"), ("a good. story", "1"), ("the bad film", "0"), ("a bad story", "0")]
    examples = [SequenceExample((text,), label, "") for text, label in rows]
    assert set(class_words(examples, 1)) == {"good", "bad"}
    attack, examples = make_attack("elmo", "AutoModelForSequenceClassification")
    with pytest.raises(CtxError, match="reads characters"):
        attack.search(examples, TriggerOptions(), [])
    with pytest.raises(CtxError, match="no label 'fine'"):
        ClassificationAttack(Predictor(attack.task, attack.model, attack.tokenizer), "fine")
    attack, examples = make_attack("bert", "AutoModelForSequenceClassification")
    with pytest.raises(CtxError, match="needs 600"):
        attack.search(examples, TriggerOptions(length=300), [])
    attack.task.arguments.max_length = 4
    with pytest.raises(CtxError, match="do not contain the 3 tokens"):
        attack.search(examples, TriggerOptions(), [])


def test_class_words_have_the_highest_z_scores() -> None:
    """Log-odds with one pseudo-count per word (Monroe et al. 2008)."""
    texts = {"a": "x x x x y y z u u u", "b": "x y y y y z z v", "c": "w w x z u v v v"}
    examples = [SequenceExample((word, ""), label, "") for label, text in texts.items() for word in text.split()]
    words = sorted({*"".join(texts.values())} - {" "})

    def z_score(word: str, label: str) -> float:
        inside = {w: texts[label].count(w) + 1 for w in words}
        outside = {w: sum(text.count(w) for other, text in texts.items() if other != label) + 1 for w in words}
        log_odds = [np.log(counts[word] / (sum(counts.values()) - counts[word])) for counts in (inside, outside)]
        return (log_odds[0] - log_odds[1]) / (1 / inside[word] + 1 / outside[word]) ** 0.5

    best_words = [sorted(words, key=lambda word: -z_score(word, label))[:2] for label in texts]
    assert class_words(examples, 2) == list(dict.fromkeys(word for words in best_words for word in words))


@pytest.mark.parametrize("increases_loss", [True, False])
def test_success_is_a_share_of_vulnerable_examples(increases_loss: bool) -> None:
    """Of the correct predictions, or with a target of the other ones, those that the trigger of a model changes."""
    outcomes = np.random.default_rng(0).integers(0, 2, (2, 5, 40)).astype(float)  # (models, texts, examples)
    texts = ["", "a", "b", "c c", "d d"]

    def make_stub(model: int) -> Any:
        return SimpleNamespace(
            model=SimpleNamespace(name_or_path=""),
            increases_loss=increases_loss,
            has_binary_outcomes=True,
            outcomes=lambda examples, text: outcomes[model, texts.index(text), examples],
            trigger_text=" ".join,
            search=lambda *arguments: SimpleNamespace(vocabulary=["cd"[model]], run=lambda name: ["ab"[model]]),
        )

    options = TriggerOptions(length=2)
    result = measure_triggers([make_stub(0), make_stub(1)], 2, range(40), options, seed=3, random_triggers=1)
    test_half = split_halves(range(40), 3)[1]
    assert sorted(split_halves(range(40), 3)[0] + test_half) == list(range(40))
    assert split_halves("xy", 3) in ((["x"], ["y"]), (["y"], ["x"]))
    with pytest.raises(CtxError, match="Got 1 examples"):
        split_halves("x", 3)
    assert result.triggers == ["a", "b"]
    for model in range(2):
        plain, *changed = outcomes[model][:, test_half]
        assert result.plain[model] == np.mean(plain)
        assert result.transferred[:, model].tolist() == pytest.approx([np.mean(values) for values in changed[:2]])
        assert result.random[:, model].tolist() == pytest.approx([np.mean(values) for values in changed[2:]])
        for attacked, values in enumerate(changed[:2]):
            changes = [new != old for old, new in zip(plain, values, strict=True) if old == increases_loss]
            assert result.success[attacked, model] == pytest.approx(sum(changes) / len(changes))


def test_questions_with_a_question_word(tmp_path: Path) -> None:
    entries = [{"id": text, "question": text, "answers": []} for text in ("When?", "Who ran?", "who sat?", "A who")]
    data = {"data": [{"paragraphs": [{"context": "Two dogs ran.", "qas": entries}]}]}
    (tmp_path / "dev.json").write_text(json.dumps(data))
    attack, _ = make_attack("bert", "AutoModelForQuestionAnswering")
    for word, questions in (("Who", ["Who ran?", "who sat?"]), (None, ["When?", "Who ran?", "who sat?", "A who"])):
        arguments = TriggerArguments(
            model=[], validation_file=str(tmp_path / "dev.json"), output_dir="", question_word=word
        )
        groups, _ = read_examples(arguments, attack.task.arguments, attack)
        assert {name: [item.question for item in items] for name, items in groups.items()} == {
            (word or "all").lower(): questions
        }


def test_outcomes_and_reused_triggers() -> None:
    """Outcomes follow from the predictions of the model; given triggers are not searched again."""
    attack, examples = make_attack("bert", "AutoModelForSequenceClassification")
    targeted = ClassificationAttack(Predictor(attack.task, attack.model, attack.tokenizer), "good")
    trigger = "stone river"
    with torch.no_grad():
        texts = [example.texts[0] for example in examples], [f"{trigger} {example.texts[1]}" for example in examples]
        label_ids = attack.model(**attack.tokenizer(*texts, padding=True, return_tensors="pt")).logits.argmax(1)
    predicted = [LABELS[index] for index in label_ids]
    assert attack.outcomes(examples, trigger).tolist() == [p == e.label for p, e in zip(predicted, examples)]
    assert targeted.outcomes(examples, trigger).tolist() == [p == "good" for p in predicted]
    attacks = [attack, make_attack("elmo", "AutoModelForSequenceClassification")[0]]
    options = TriggerOptions(length=2, candidates=4, epochs=1)
    result = measure_triggers(attacks, 1, examples, options, seed=0, random_triggers=3)
    assert result.random.shape == (3, 2)
    assert result.transferred.shape == result.success.shape == (1, 2)
    reused = measure_triggers(attacks, 1, examples, options, seed=0, random_triggers=3, triggers=result.triggers)
    assert np.array_equal(reused.transferred, result.transferred)
    assert np.array_equal(reused.random, result.random)
    lm_attack, texts = make_attack("gpt2", "AutoModelForCausalLM")
    input_ids = lm_attack.tokenizer("stone river two dogs", return_tensors="pt")["input_ids"]
    input_ids = torch.cat([torch.tensor([[lm_attack.tokenizer.eos_token_id]]), input_ids], 1)
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(
            lm_attack.model(input_ids).logits[0, :-1], input_ids[0, 1:], reduction="none"
        )
    assert lm_attack.outcomes(["two dogs"], trigger)[0] == pytest.approx(float(losses[2:].mean()), rel=1e-5)


@pytest.mark.parametrize(
    ("family", "auto_class", "max_length", "expected"),
    [
        ("bert", "AutoModelForSequenceClassification", None, 9),
        ("bert", "AutoModelForSequenceClassification", 12, 12),
        ("bert", "AutoModelForQuestionAnswering", None, 9),
        ("gpt2", "AutoModelForCausalLM", None, 32),
        ("gpt2", "AutoModelForCausalLM", 12, 12),
    ],
)
def test_max_length(family: str, auto_class: str, max_length: int | None, expected: int, tmp_path: Path) -> None:
    """By default the maximum length of fine-tuning, or for a language model its longest input below 128 tokens."""
    pair = tiny_pair(family, auto_class, TEXTS, max_position_embeddings=32)
    tasks = {
        "AutoModelForSequenceClassification": SequenceClassification,
        "AutoModelForQuestionAnswering": QuestionAnswering,
    }
    if auto_class in tasks:
        save_summary(save(tmp_path, *pair), tasks[auto_class].name, max_length=9)
    flags = {"model": [str(save(tmp_path, *pair))], "validation_file": "texts.txt", "output_dir": str(tmp_path)}
    arguments = TriggerArguments(**flags, answer="happy", max_length=max_length)
    (attack,) = open_attacks(arguments, TaskArguments(), TriggerOptions(), DeviceArguments())
    options: Any = attack if isinstance(attack, ContinuationAttack) else attack.task.arguments
    assert options.max_length == expected


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folder with a BERT, a GloVe and an ELMo trained to separate positive from negative words, and their examples."""
    folder = tmp_path_factory.mktemp("classifiers")
    good, bad, neutral = ["lovely", "great", "charming"], ["awful", "dreadful", "boring"], ["river", "stone", "green"]
    texts = [f"the {noun} was {word}" for noun in ("film", "story", "song", "meal") for word in good + bad]
    labels = [int(text.split()[-1] in good) for text in texts]
    lines = [f"{text}\t{('neg', 'pos')[label]}" for text, label in zip(texts, labels, strict=True)]
    (folder / "texts.tsv").write_text("\n".join(["text\tlabel", *lines]) + "\n")
    for family, rate in {"bert": 0.003, "glove": 0.1, "elmo": 0.02}.items():
        fields = {"id2label": {0: "neg", 1: "pos", 2: "none"}, "max_position_embeddings": 64}
        vocabulary = [*texts, " ".join(neutral)]
        model, tokenizer = tiny_pair(family, "AutoModelForSequenceClassification", vocabulary, **fields)
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        for _ in range(60):  # ELMo starts with small LSTM weights
            optimizer.zero_grad()
            loss = model(**batch, labels=torch.tensor(labels)).loss
            loss.backward()
            optimizer.step()
        assert loss < 0.2, family
        save(folder / family, model.eval(), tokenizer)
    return folder, folder / "texts.tsv"


@pytest.mark.slow
def test_triggers_command(classifiers: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfer matrix of two attacked models and a character model, class words, and resuming."""
    folder, file = classifiers
    flags = {"model": [folder / "bert", folder / "glove"], "transfer_to": [folder / "elmo"], "validation_file": file}
    flags |= {"max_length": 16, "length": 2, "candidates": 12, "epochs": 1, "random_triggers": 2, "seeds": [0, 1]}
    output = command_output("analyze triggers", **flags, label="pos", output_dir=tmp_path / "a")
    assert "trigger of glove" in output
    result = json.loads((tmp_path / "a" / "triggers.json").read_text())
    values = result["values"]["pos"]
    assert np.shape(values["transferred"]) == (2, 2, 3)
    assert np.mean(values["plain"]) > 0.9
    assert np.array(values["transferred"])[:, [0, 1], [0, 1]].max() < 0.4 < np.mean(values["random"])
    negative_words = {"awful", "dreadful", "boring"}
    partial_file = tmp_path / "a" / "triggers-partial.json"
    assert not partial_file.exists()
    rerun_flags = {**flags, "label": "pos", "output_dir": tmp_path / "a"}
    assert "already holds triggers.json" in command_output("analyze triggers", **rerun_flags, fails=True)
    with monkeypatch.context() as patch:
        error = CtxError("interrupted", hint="continue.")
        patch.setattr("hf_ctxmodels.cli.analyze_triggers.trigger_result", Mock(side_effect=error))
        command_output("analyze triggers", **rerun_flags, overwrite=True, fails=True)
    partial = json.loads(partial_file.read_text())
    assert list(partial["results"]) == ["pos, seed 0", "pos, seed 1"]
    partial["results"] = {key: ["river stone", "green"] for key in partial["results"]}
    partial_file.write_text(json.dumps(partial))
    assert "river stone" in command_output("analyze triggers", **rerun_flags, overwrite=True)
    unused_flags = {**rerun_flags, "output_dir": tmp_path / "c", "answer": "king"}
    assert "--answer" in command_output("analyze triggers", **unused_flags, fails=True)
    rerun_flags |= {"output_dir": tmp_path / "b", "exclude_class_words": 3, "train_file": file, "seeds": 0}
    command_output("analyze triggers", **rerun_flags)
    result = json.loads((tmp_path / "b" / "triggers.json").read_text())
    assert not negative_words & set(" ".join(result["values"]["pos"]["triggers"][0]).split())
    assert negative_words <= set(result["settings"]["excluded_words"])
    assert "No examples of the label 'fine'" in command_output(
        "analyze triggers", **{**flags, "label": "fine", "output_dir": tmp_path / "c"}, fails=True
    )
    flags |= {"model": folder / "elmo", "output_dir": tmp_path / "c"}
    assert "reads characters" in command_output("analyze triggers", **flags, fails=True)
