"""Pipelines of transformers against the outputs of model and tokenizer."""

import pytest
import torch
from commands import save, tiny_pair
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, pipeline

from hf_ctxmodels import CtxError
from hf_ctxmodels.inference import WordTaggingPipeline, answer_questions
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels.spec import FamilySpec

TEXTS = ["the cat saw a small garden", "nobody", "a dog carried seven letters over the bridge"]
CONTEXT = "the old sailor mended the bridge and nobody saw the red boat"


def parametrize_families(auto_name: str) -> pytest.MarkDecorator:
    """Parametrize `family` over the families with this Auto class."""
    families = [family for family in FAMILIES.values() if auto_name in family.models]
    return pytest.mark.parametrize("family", families, ids=lambda family: family.name)


@pytest.fixture
def save_family_model(family: FamilySpec, tmp_path):
    """A function that saves a random model and returns its directory, the model and its tokenizer."""

    def save_model(auto_name: str, **config):
        model, tokenizer = tiny_pair(family.name, auto_name, [*TEXTS, CONTEXT], **config)
        return str(save(tmp_path, model, tokenizer)), model, tokenizer

    return save_model


@torch.no_grad()
def model_outputs(model, tokenizer, *texts: str):
    return model(**tokenizer(*texts, return_tensors="pt"))


@parametrize_families("AutoModel")
def test_feature_extraction_pipeline(save_family_model):
    directory, model, tokenizer = save_family_model("AutoModel")
    features = pipeline("feature-extraction", model=directory)(TEXTS, batch_size=3, return_tensors=True)
    for text, actual in zip(TEXTS, features, strict=True):
        expected = model_outputs(model, tokenizer, text).last_hidden_state
        length = expected.shape[1]
        actual = actual[:, :length] if tokenizer.padding_side == "right" else actual[:, -length:]
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@parametrize_families("AutoModelForMaskedLM")
def test_fill_mask_pipeline(save_family_model):
    directory, model, tokenizer = save_family_model("AutoModelForMaskedLM")
    text = f"the cat saw a {tokenizer.mask_token} garden"
    results = pipeline("fill-mask", model=directory)(text, top_k=3)
    position = tokenizer(text)["input_ids"].index(tokenizer.mask_token_id)
    expected = model_outputs(model, tokenizer, text).logits[0, position].softmax(-1).topk(3)
    assert [result["token"] for result in results] == expected.indices.tolist()
    assert [result["score"] for result in results] == pytest.approx(expected.values.tolist(), abs=1e-5)
    assert results[0]["token_str"] == tokenizer.decode([results[0]["token"]])


@parametrize_families("AutoModelForSequenceClassification")
def test_text_classification_pipelines(save_family_model):
    """Texts, pairs, and zero-shot classification by an entailment classifier."""
    labels = {0: "contradiction", 1: "neutral", 2: "entailment"}
    directory, model, tokenizer = save_family_model("AutoModelForSequenceClassification", id2label=labels)
    results = pipeline("text-classification", model=directory)(TEXTS, batch_size=3, top_k=None)
    for text, result in zip(TEXTS, results, strict=True):
        expected = model_outputs(model, tokenizer, text).logits[0].softmax(-1).tolist()
        scores = {row["label"]: row["score"] for row in result}
        assert [scores[label] for label in labels.values()] == pytest.approx(expected, abs=1e-5)
    pair = {"text": TEXTS[0], "text_pair": TEXTS[2]}
    expected = model_outputs(model, tokenizer, *pair.values()).logits[0].softmax(-1)
    assert pipeline("text-classification", model=directory)(pair)["label"] == labels[int(expected.argmax())]

    classifier = pipeline("zero-shot-classification", model=directory)
    topics, template = ["garden", "bridge"], "nobody saw a {}"
    result = classifier(TEXTS[0], candidate_labels=topics, hypothesis_template=template)
    entailed = [model_outputs(model, tokenizer, TEXTS[0], template.format(topic)).logits[0, 2] for topic in topics]
    expected = dict(zip(topics, torch.stack(entailed).softmax(0).tolist()))
    assert result["scores"] == pytest.approx([expected[label] for label in result["labels"]], abs=1e-5)


@parametrize_families("AutoModelForTokenClassification")
def test_token_classification_pipeline(save_family_model):
    labels = {0: "O", 1: "B-X", 2: "I-X"}
    directory, model, tokenizer = save_family_model("AutoModelForTokenClassification", id2label=labels)
    # the pipeline of transformers needs one id for each token
    options = {"pipeline_class": WordTaggingPipeline} if model.token_id_axes else {}
    tagger = pipeline("token-classification", model=directory, ignore_labels=[], **options)
    for text, words in zip(TEXTS, tagger(TEXTS, batch_size=3), strict=True):
        special = torch.tensor(tokenizer(text, return_special_tokens_mask=True).special_tokens_mask)
        logits = model_outputs(model, tokenizer, text).logits[0, special == 0]
        assert [word["entity"] for word in words] == [labels[int(index)] for index in logits.argmax(-1)]
        assert [word["score"] for word in words] == pytest.approx(logits.softmax(-1).amax(-1).tolist(), abs=1e-5)
        surface_forms = [word["word"].strip("#▁Ġ").removesuffix("</w>") for word in words]
        assert [text[word["start"] : word["end"]] for word in words] == surface_forms


@parametrize_families("AutoModelForQuestionAnswering")
def test_answer_questions(save_family_model):
    # transformers 5 has no question-answering pipeline
    directory, model, tokenizer = save_family_model("AutoModelForQuestionAnswering")
    questions = [("nobody saw a boat", CONTEXT), ("who", " and ".join([CONTEXT, TEXTS[0]] * 6))]
    loaded = AutoModelForQuestionAnswering.from_pretrained(directory)
    answers = answer_questions(
        loaded, AutoTokenizer.from_pretrained(directory), questions, max_length=38, doc_stride=6, batch_size=3
    )
    for answer, (_, context) in zip(answers, questions, strict=True):
        assert answer.text
        assert answer.text in context

    # The first context fits one window: its answer is the best span of one forward pass.
    encoding = tokenizer(*questions[0], return_tensors="pt", return_offsets_mapping=True)
    offsets = encoding.pop("offset_mapping")[0].tolist()
    with torch.no_grad():
        output = model(**encoding)
    in_context = torch.tensor([sequence_id == 1 for sequence_id in encoding.sequence_ids(0)])
    start, end = (
        scores[0].masked_fill(~in_context, float("-inf")) for scores in (output.start_logits, output.end_logits)
    )
    spans = [(i, j) for i in range(len(offsets)) for j in range(i, len(offsets))]
    first, last = max(spans, key=lambda span: float(start[span[0]] + end[span[1]]))
    assert answers[0].text == CONTEXT[offsets[first][0] : offsets[last][1]]
    ids = encoding.input_ids[0].tolist()
    null_position = ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in ids else 0  # scores "no answer"
    null_score = float(output.start_logits[0, null_position] + output.end_logits[0, null_position])
    expected = torch.sigmoid(torch.tensor(null_score - float(start[first] + end[last])))
    assert answers[0].no_answer_probability == pytest.approx(float(expected), abs=1e-4)


def test_answer_questions_without_questions_and_beyond_the_positions(tmp_path):
    texts = [CONTEXT]
    model, tokenizer = tiny_pair("bert", "AutoModelForQuestionAnswering", texts, max_position_embeddings=32)
    assert answer_questions(model, tokenizer, []) == []
    questions = [("who", " and ".join(texts * 9))]
    expected = answer_questions(model, tokenizer, questions, max_length=32)
    assert answer_questions(model, tokenizer, questions) == expected, "windows of at most 32 tokens"
    with pytest.raises(CtxError, match="batch_size=0"):
        answer_questions(model, tokenizer, questions, batch_size=0)
