"""Explorer: predictions, server errors and limits, and the page in a browser."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from html import unescape
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import torch
import transformers
from commands import command_output, save, tiny_pair
from starlette.testclient import TestClient

from hf_ctxmodels import CtxError
from hf_ctxmodels.analysis.explorer import explored_model
from hf_ctxmodels.analysis.explorer.explored_model import BLANK, ExploredModel
from hf_ctxmodels.analysis.explorer.server import ACTIONS, create_app
from hf_ctxmodels.architectures.word_alignment import split_words
from hf_ctxmodels.core.devices import DeviceArguments
from hf_ctxmodels.evaluation.scoring import saved_language_model_class
from hf_ctxmodels.registry import FAMILIES

TEXTS = ["the old bank lends money", "a boat is at the bank of the river", "money is in the bank", "the river is old"]
SENTENCES = [text.split() for text in TEXTS]
HOSTILE = "<img src=x onerror=alert(1)> bank"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    auto_classes = {"bert": "AutoModelForMaskedLM", "gpt2": "AutoModelForCausalLM", "ulmfit": "AutoModel"}
    for family, auto_class in auto_classes.items():
        model, tokenizer = tiny_pair(family, auto_class, [*TEXTS, HOSTILE], initializer_range=0.5)
        save(folder / family, model, tokenizer)
    (folder / "corpus.txt").write_text("\n".join([*TEXTS, "a <b>bank</b> bank"]))
    return folder


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, ExploredModel]:
    models = {}
    for name in ("bert", "gpt2", "ulmfit"):
        models[name] = ExploredModel.open(name, str(folder / name), DeviceArguments(device="cpu"))
        models[name].encode_corpus([*SENTENCES, ["a", "<b>bank</b>", "bank"]])
    return models


@pytest.fixture(scope="module")
def client(models: dict[str, ExploredModel]) -> TestClient:
    return TestClient(create_app(list(models.values())), base_url="http://127.0.0.1:8765")


def test_predictions_equal_model_outputs(models: dict[str, ExploredModel]) -> None:
    bert, gpt2 = models["bert"], models["gpt2"]
    assert [model.task for model in models.values()] == ["masked", "causal", None]
    with torch.no_grad():
        ids = bert.tokenizer("the [MASK] is old", return_tensors="pt")["input_ids"]
        masked_probabilities = bert.model(ids).logits[0, 2].softmax(-1)
        prompt_ids = [gpt2.tokenizer.eos_token_id, *gpt2.tokenizer("the old")["input_ids"]]
        next_probabilities = gpt2.model(torch.tensor([prompt_ids])).logits[0, -1].softmax(-1)
    for (prediction, *_), expected, tokenizer in (
        (bert.predict(f"the {BLANK} is old")[0], masked_probabilities, bert.tokenizer),
        (gpt2.predict(f"the old {BLANK} is")[0], next_probabilities, gpt2.tokenizer),
    ):
        assert prediction.probability == pytest.approx(float(expected.max()), rel=1e-4)
        assert prediction.token == tokenizer.decode([int(expected.argmax())])
    assert gpt2.predict("the old") == gpt2.predict(f"the old {BLANK}")


def test_neighbors_and_senses(models: dict[str, ExploredModel]) -> None:
    """The nearest neighbor of a corpus sentence is the sentence itself."""
    bert = models["bert"]
    for layer in (0, 3):
        (word, context, cosine), *more_neighbors = bert.neighbors(SENTENCES[0], 2, layer, count=4)
        assert (word, context) == ("bank", "the old [bank] lends money") or layer == 0
        assert cosine == pytest.approx(1, abs=2e-3)
        assert cosine >= more_neighbors[0][2] >= more_neighbors[-1][2]
    figure = bert.sense_map(["old", "bank"], 1, 3)
    assert len(figure.points) == 5
    assert list(figure.groups) == ["corpus"] * 4 + ["your sentence"]
    assert figure.texts[-1] == "old [bank]"
    assert figure.texts[:2] == ["the old [bank] lends money", "a boat is at the [bank] of the river"]
    sentences = [
        *bert.encoder.encode(SENTENCES[:3]),
        *bert.encoder.encode([["a", "<b>bank</b>", "bank"], ["old", "bank"]]),
    ]
    vectors = torch.stack([sentences[i].vectors[j, 3] for i, j in ((0, 2), (1, 5), (2, 4), (3, 2), (4, 1))]).double()
    centered = vectors - vectors.mean(0)
    scale = torch.linalg.svdvals(centered)[:2]
    points = torch.tensor(figure.points, dtype=torch.float64)
    torch.testing.assert_close(torch.linalg.svdvals(points), scale, atol=0.02, rtol=2e-3)


def post(client: TestClient, action: str, **values: Any) -> tuple[int, dict[str, Any]]:
    response = client.post(f"/api/{action}", json=values)
    return response.status_code, response.json()


def comparison_data(answer: dict[str, Any]) -> dict[str, Any]:
    """Data embedded in the figure of an answer."""
    return json.loads(answer["figure"].partition('<script type="application/json">')[2].partition("</script>")[0])


def test_server_answers(client: TestClient) -> None:
    page = client.get("/")
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert "http:" not in page.text.replace("http://127.0.0.1", "")
    for name in ("explorer.css", "explorer.js", "report.js"):
        assert name in page.text
        assert client.get(f"/assets/{name}").status_code == 200
    _, answer = post(client, "models")
    assert [model["task"] for model in answer["models"]] == ["masked", "causal", None]
    assert post(client, "words", text=" a  b ") == (200, {"words": ["a", "b"]})
    assert post(client, "words", text="a ___, b")[1] == {"words": ["a", "___", ",", "b"]}
    status, answer = post(client, "predictions", model="bert", text="___ and ___")
    assert [len(blank) for blank in answer["predictions"]] == [10, 10]
    status, answer = post(client, "comparison", text=HOSTILE)
    assert status == 200
    assert "<img" not in answer["figure"]
    assert "onerror" in unescape(answer["figure"])
    data = comparison_data(answer)
    names = ["log P, bert", "rank, bert", "log P, gpt2", "rank, gpt2", "difference"]
    assert list(data["columns"]) == names
    first, _, second, _, difference = data["columns"].values()
    assert difference[1] == pytest.approx(first[1] - second[1])
    assert (
        data["columns"] == comparison_data(post(client, "comparison", text=HOSTILE.replace(" ", " ___ "))[1])["columns"]
    )
    for action, values in {
        "attention": {"model": "bert", "text": HOSTILE},
        "neighbors": {"model": "ulmfit", "text": "the bank", "word": 1, "layer": 1},
        "senses": {"model": "gpt2", "text": "the bank", "word": 1, "layer": 1},
    }.items():
        assert post(client, action, **values)[0] == 200
    assert "<img" not in post(client, "attention", model="bert", text=HOSTILE)[1]["figure"]


@pytest.mark.parametrize(
    ("action", "values", "message"),
    [
        ("predictions", {"model": "ulmfit", "text": "a ___"}, "no head that predicts"),
        ("predictions", {"model": "bert", "text": "the bank"}, "no blank"),
        ("predictions", {"model": "bert", "text": " "}, "no sentence"),
        ("predictions", {"model": "bert", "text": "bank " * 99}, "tokens, the limit is"),
        ("predictions", {"model": "x", "text": "a"}, "no model 'x'"),
        ("predictions", {"text": "a"}, "Expected model"),
        ("comparison", {"text": 3}, "Expected text"),
        ("attention", {"model": "ulmfit", "text": "the bank"}, "attention"),
        ("neighbors", {"model": "bert", "text": "bank", "word": 3, "layer": 0}, "no word 3"),
        ("neighbors", {"model": "bert", "text": "bank", "word": 0, "layer": 9}, "no layer 9"),
        ("neighbors", {"model": "bert", "text": "bank", "word": True, "layer": 0}, "Expected word"),
        ("senses", {"model": "bert", "text": "unseen", "word": 0, "layer": 0}, "does not occur"),
    ],
)
def test_invalid_requests_return_errors(action: str, values: dict[str, Any], message: str, client: TestClient) -> None:
    status, answer = post(client, action, **values)
    assert status == 400
    assert message in answer["error"]


def test_values_that_are_not_finite_are_errors() -> None:
    """JSON has no nan; it would be drawn as 0, or be the highest rank."""
    model, tokenizer = tiny_pair("bert", "AutoModelForMaskedLM", TEXTS)
    explored = ExploredModel("nan", model, tokenizer)
    explored.encode_corpus(SENTENCES)
    with torch.no_grad():
        model.base_model.layers[-1].attention.qkv_proj.weight.fill_(torch.nan)
    with pytest.raises(CtxError, match=r"vectors .* not finite"):
        explored.encode_corpus(SENTENCES)
    client = TestClient(create_app([explored]), base_url="http://127.0.0.1:8765")
    text, word = f"the {BLANK} is old", {"word": 1, "layer": 3}
    requests: dict[str, dict[str, int]] = {"predictions": {}, "comparison": {}, "attention": {}}
    for action, values in (requests | {"neighbors": word, "senses": word}).items():
        status, answer = post(client, action, model="nan", text=text, **values)
        assert (status, "not finite" in answer["error"]) == (400, True), action


def test_lone_surrogate(client: TestClient) -> None:
    """The value of a text field may have one, which JSON escapes."""
    body = json.dumps({"model": "gpt2", "text": "the \ud800"})
    response = client.post("/api/predictions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 200


def test_sample_of_occurrences_is_named(models: dict[str, ExploredModel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explored_model, "MAX_OCCURRENCES", 3)
    figure = models["bert"].sense_map(["old", "bank"], 1, 3)
    assert figure.caption.startswith("A random sample of 3 of 4 occurrences")


def test_refused_requests(client: TestClient) -> None:
    """Foreign hosts (DNS rebinding), foreign origins, wrong content types, large bodies and unknown paths."""
    assert client.get("/", headers={"host": "evil.example:8765"}).status_code == 400
    assert client.get("/", headers={"host": "localhost:8765"}).status_code == 200
    for origin, status in {"http://evil.example": 403, "null": 403, "http://127.0.0.1:8765": 200}.items():
        assert client.post("/api/models", json={}, headers={"origin": origin}).status_code == status
    assert client.post("/api/models", content="{}", headers={"content-type": "text/plain"}).status_code == 415
    assert client.post("/api/models", json={"text": "x" * 70000}).status_code == 413
    for body in ("[]", "{", "[" * 30000):
        assert client.post("/api/models", content=body, headers={"content-type": "application/json"}).status_code == 400
    assert client.post("/api/eval", json={}).status_code == 404
    assert client.get("/assets/..%2fserver.py").status_code == 404
    assert client.get("/api/models").status_code == 405
    assert set(ACTIONS) == {"models", "words", "predictions", "comparison", "attention", "neighbors", "senses"}


def test_transformers_models(tmp_path: Path, folder: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "bert")
    config = transformers.BertConfig(vocab_size=len(tokenizer), **sizes)
    save(tmp_path, transformers.BertForMaskedLM(config), tokenizer)
    model = ExploredModel.open("bert", str(tmp_path), DeviceArguments(device="cpu"))
    assert model.task == "masked"
    assert len(model.predict("the ___")[0]) == 10
    assert len(model.attention_view("the bank").attention) == 2
    for architecture, expected in (
        ("BertModel", None),
        ("BertForSequenceClassification", None),
        ("ElectraForPreTraining", None),
        ("BertForPreTraining", "AutoModelForCausalLM"),
        ("BertForMaskedLM", "AutoModelForMaskedLM"),
    ):
        config.architectures = [architecture]
        assert saved_language_model_class(config) in (expected, expected and "AutoModelForMaskedLM")
    config.model_type, config.architectures = "xlm-roberta", ["XLMRobertaModel"]
    assert saved_language_model_class(config) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_all_families(family: str) -> None:
    """Each family supports the views that apply to it and raises an error for the others."""
    names = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForPreTraining", "AutoModel")
    auto_class = next(name for name in names if name in FAMILIES[family].models)
    model = ExploredModel(family, *tiny_pair(family, auto_class, [*TEXTS, HOSTILE]))
    model.encode_corpus(SENTENCES)
    if model.task is None:
        assert not model.is_language_model or model.model.is_backward
        with pytest.raises(CtxError, match="no head that predicts"):
            model.predict("the ___ bank")
    else:
        num_blanks = 1 if model.task == "causal" else 2
        assert [len(blank) for blank in model.predict("the ___ bank ___")] == [10] * num_blanks
    with nullcontext() if model.is_language_model else pytest.raises(CtxError, match="not a language model"):
        assert model.score_words("the bank ___").words == ["the", "bank"]
    has_attention = hasattr(model.model.config, "num_attention_heads")
    with nullcontext() if has_attention else pytest.raises(CtxError, match="attention"):
        assert len(model.attention_view("the bank").words) >= 2
    for layer in model.encoder.layers:
        assert len(model.neighbors(["the", "bank"], 1, layer)) == 10
        assert len(model.sense_map(["the", "bank"], 1, layer).points) == 4


def test_explore_command_errors(folder: Path) -> None:
    assert "There is no such directory" in command_output(
        "analyze", "explore", "--model", folder / "x", "--port", 0, fails=True
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExploredModel, "open", None)  # no model is loaded before all paths are checked
        models = (folder / "bert", folder / "x")
        assert "There is no such directory" in command_output(
            "analyze", "explore", "--model", *models, "--port", 0, fails=True
        )
    error = command_output("analyze explore", "--model", "a", "b", "c", "--port", 0, fails=True)
    assert "3 models" in error
    assert "port=70000 is out of range" in command_output(
        "analyze", "explore", model=folder / "bert", port=70000, fails=True
    )


@pytest.fixture
def server(folder: Path) -> Iterator[str]:
    """Address of a running `analyze explore` command."""
    arguments = ["analyze", "explore", "--model", folder / "bert", folder / "gpt2", "--corpus", folder / "corpus.txt"]
    command = [sys.executable, "-m", "hf_ctxmodels", *map(str, arguments), "--port", "0"]
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=root)
    try:
        assert process.stderr is not None
        address = next(line.split()[0] for line in process.stderr if line.startswith("http://"))
        yield address
    finally:
        process.terminate()
        process.wait(10)


LATE_NEIGHBORS = """
globalThis.lateAnswers = 0;
const send = fetch;
let requests = 0;
globalThis.fetch = async (address, options) => {
  if (!address.endsWith("neighbors") || requests++ >= 2) return send(address, options);
  await new Promise((resolve) => setTimeout(resolve, 4000));
  setTimeout(() => { lateAnswers += 1; }, 100);
  return new Response(JSON.stringify({ neighbors: [{ context: "a late answer", cosine: 0 }] }));
};
"""
"""Delays the answers about the neighbors of the first selected word of both models."""


@pytest.mark.slow
def test_page_in_browser(server: str, tmp_path: Path) -> None:
    """Operate the page by keyboard through Chromium's debugging protocol."""
    browser = which("chromium") or which("google-chrome")
    if browser is None:
        pytest.skip("needs chromium")
    connect = pytest.importorskip("websockets.sync.client", reason="needs websockets").connect
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={tmp_path}"]
    process = subprocess.Popen([browser, *flags, server], stderr=subprocess.PIPE, text=True)
    try:
        port_file = tmp_path / "DevToolsActivePort"
        for _ in range(300):
            if port_file.exists() and port_file.read_text().strip():
                break
            time.sleep(0.1)
        else:
            pytest.skip("needs chromium, which does not start")
        port = port_file.read_text().split()[0]
        import httpx2

        for _ in range(100):
            pages = [page for page in httpx2.get(f"http://127.0.0.1:{port}/json").json() if page["type"] == "page"]
            if pages and pages[0]["url"].startswith(server):
                break
            time.sleep(0.1)
        with connect(pages[0]["webSocketDebuggerUrl"], max_size=2**26) as connection:
            drive_page(connection)
    finally:
        process.terminate()
        process.wait(10)


def drive_page(connection: Any) -> None:
    """Submit a sentence by Enter, check the answers, select a word by arrow keys, and cause an error."""
    message_ids = iter(range(1, 10**6))

    def call(method: str, **parameters: Any) -> dict[str, Any]:
        message_id = next(message_ids)
        connection.send(json.dumps({"id": message_id, "method": method, "params": parameters}))
        while True:
            message = json.loads(connection.recv(timeout=30))
            if message.get("id") == message_id:
                return message["result"]

    def read(expression: str) -> Any:
        return call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait_for(expression: str) -> None:
        for _ in range(200):
            if read(expression):
                return
            time.sleep(0.1)
        raise AssertionError(f"{expression}; page: {read('document.body.innerText')}")

    def press(key: str, text: str = "", code: int = 0) -> None:
        for event_type in ("keyDown", "keyUp"):
            call("Input.dispatchKeyEvent", type=event_type, key=key, code=key, text=text, windowsVirtualKeyCode=code)

    wait_for("document.querySelectorAll('#models .model').length === 2")
    read("document.getElementById('text').focus(); document.getElementById('text').select()")
    call("Input.insertText", text=HOSTILE + " ___ <b>")
    press("Enter", "\r", 13)
    wait_for("document.getElementById('status').textContent === 'Done.'")
    assert read("document.querySelectorAll('#predictions .bars').length") == 2
    assert read("document.querySelectorAll('#predictions .bars li').length") == 20
    assert read("document.querySelectorAll('#comparison .token').length") == len(split_words(HOSTILE + " <b>"))
    assert read("document.querySelectorAll('#attention .attention td').length") > 50
    assert read("document.querySelectorAll('main img, main b').length") == 0
    words = split_words(HOSTILE)
    read(f"document.querySelectorAll('#contexts input')[{words.index('bank') - 1}].focus()")
    press("ArrowRight", "", 39)
    wait_for("document.querySelectorAll('#contexts .neighbors').length === 2")
    assert read("document.querySelector('#contexts input:checked').parentNode.textContent") == "bank"
    wait_for("document.querySelectorAll('#contexts .point').length > 4")
    read(LATE_NEIGHBORS)
    press("ArrowLeft", "", 37)
    press("ArrowLeft", "", 37)
    wait_for("lateAnswers === 2")
    assert "a late answer" not in read("document.querySelector('#contexts').textContent")

    def submit(text: str) -> None:
        read("document.getElementById('text').focus(); document.getElementById('text').select()")
        call("Input.insertText", text=text)
        press("Enter", "\r", 13)

    submit("bank " * 99)
    wait_for("document.querySelector('#predictions .error')?.textContent.includes('the limit is')")
    submit("x" * 400)
    wait_for("document.querySelector('#contexts label')?.textContent.length === 400")
    assert read("document.documentElement.scrollWidth <= innerWidth")
    submit(" ")
    wait_for("document.getElementById('status').textContent.includes('There is no sentence')")
    assert read("document.querySelectorAll('#results section:not([hidden])').length") == 0
    for expected in ("xxx", "bank bank"):
        read("history.back()")
        wait_for(f"document.getElementById('text').value.startsWith('{expected}')")
    wait_for("document.querySelector('#predictions .error')?.textContent.includes('the limit is')")
    assert read("location.search").startswith("?text=bank+bank")
