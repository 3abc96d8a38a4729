"""The web application of the explorer: a page, its assets, and JSON answers.

It serves one user on the same machine: it answers only requests for a local host name, which a page of another site
cannot forge (DNS rebinding), and none that such a page sends (`Origin`). The page loads nothing from elsewhere. The
answers are plain functions of the models and the values of a request, see `ACTIONS`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hf_ctxmodels.analysis.explorer.explored_model import BLANK, ExploredModel
from hf_ctxmodels.analysis.figures import figure_style
from hf_ctxmodels.analysis.report.page import ASSETS, asset, render_figure
from hf_ctxmodels.analysis.word_comparison import word_figure
from hf_ctxmodels.architectures.word_alignment import split_words
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.core.loading import matches_type

HOSTS = ("127.0.0.1", "localhost")
MAX_BODY_BYTES = 65536
_ASSETS = Path(__file__).parent / "assets"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
Models = Mapping[str, ExploredModel]
Values = Mapping[str, Any]


def value_of(values: Values, name: str, annotation: Any) -> Any:
    """A value of a request; raises CtxError if it is missing or has another type."""
    if name not in values or not matches_type(values[name], annotation):
        raise CtxError(f"Expected {name} of the type {annotation.__name__}.", hint="reload the page.")
    return values[name]


def model_of(models: Models, values: Values) -> ExploredModel:
    """The model that a request names."""
    name = value_of(values, "model", str)
    if name not in models:
        raise CtxError(f"There is no model {name!r}.", hint="reload the page.")
    return models[name]


def text_of(values: Values) -> str:
    """The sentence of a request, which is not empty; lone surrogates become "?"."""
    text = " ".join(value_of(values, "text", str).encode("utf-8", "replace").decode().split())
    if not text:
        raise CtxError("There is no sentence.", hint="write one.")
    return text


def words_of(values: Values) -> list[str]:
    """The words of the sentence of a request; a blank is a word."""
    spans = [split_words(span) for span in text_of(values).split(BLANK)]
    return [*spans[0], *(word for span in spans[1:] for word in (BLANK, *span))]


def describe(models: Models, values: Values) -> dict[str, Any]:
    """The models of the page."""
    return {"models": [model.description for model in models.values()]}


def predict(models: Models, values: Values) -> dict[str, Any]:
    """The most probable words for the blanks, or after the sentence."""
    model = model_of(models, values)
    predictions = model.predict(text_of(values))
    return {"task": model.task, "predictions": [[item._asdict() for item in blank] for blank in predictions]}


def compare(models: Models, values: Values) -> dict[str, Any]:
    """A figure with the log-probabilities of the words by all language models, and their difference for the first two
    (LMdiff; Strobelt et al. 2021, arXiv 2111.01582)."""
    text = text_of(values)
    scores = {name: model.score_words(text) for name, model in models.items() if model.is_language_model}
    if not scores:
        raise CtxError("No model is a language model.", hint="start the page with a masked or causal language model.")
    caption = (
        "Log-probability (nats) and rank of each word, without blanks. A masked language model reads both sides, and "
        "the other tokens of the same word; a causal one reads what precedes."
    )
    return {"figure": render_figure(word_figure("comparison", "Probability of each word", scores, caption))}


def split(models: Models, values: Values) -> dict[str, Any]:
    """The words of the sentence."""
    return {"words": words_of(values)}


def attend(models: Models, values: Values) -> dict[str, Any]:
    """A figure of the attention of all heads."""
    return {"figure": render_figure(model_of(models, values).attention_view(text_of(values)))}


def find_neighbors(models: Models, values: Values) -> dict[str, Any]:
    """The nearest words in the contexts of the corpus."""
    words = words_of(values)
    rows = model_of(models, values).neighbors(words, value_of(values, "word", int), value_of(values, "layer", int))
    return {"neighbors": [{"word": word, "context": text, "cosine": cosine} for word, text, cosine in rows]}


def map_senses(models: Models, values: Values) -> dict[str, Any]:
    """A map of the occurrences of a word of the sentence."""
    words = words_of(values)
    figure = model_of(models, values).sense_map(words, value_of(values, "word", int), value_of(values, "layer", int))
    return {"figure": render_figure(figure)}


ACTIONS: dict[str, Callable[[Models, Values], dict[str, Any]]] = {
    "models": describe,
    "words": split,
    "predictions": predict,
    "comparison": compare,
    "attention": attend,
    "neighbors": find_neighbors,
    "senses": map_senses,
}
"""Name in the address -> function of the models and the values of the request."""


def create_app(models: Sequence[ExploredModel]) -> Starlette:
    """The application for models with different names."""
    by_name = {model.name: model for model in models}
    lock = Lock()  # one computation at a time

    def answer(name: str, values: Values) -> dict[str, Any]:
        with lock:
            return ACTIONS[name](by_name, values)

    async def respond(request: Request) -> Response:
        name = request.path_params["action"]
        if name not in ACTIONS:
            return _error(404, "There is no such action.")
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
            return _error(403, "The request comes from another site.")
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return _error(415, "Expected JSON.")
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                return _error(413, "The sentence is too long.")
        try:
            values = json.loads(body)
            if not isinstance(values, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError):
            return _error(400, "Not a JSON object.")
        try:
            return JSONResponse(await run_in_threadpool(answer, name, values), headers=_HEADERS)
        except CtxError as error:
            return _error(400, error.message, error.hint)

    return Starlette(
        routes=[
            Route("/", _page),
            Route("/assets/{name}", _asset),
            Route("/api/{action}", respond, methods=["POST"]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS))],
    )


def _error(status: int, message: str, hint: str | None = None) -> Response:
    return JSONResponse({"error": message, "hint": hint}, status, headers=_HEADERS)


def _page(request: Request) -> Response:
    return Response(asset("explorer.html", _ASSETS), media_type="text/html", headers=_HEADERS)


def _asset(request: Request) -> Response:
    name = request.path_params["name"]
    if name == "explorer.css":
        style = asset("report.css") + figure_style("function") + asset("explorer.css", _ASSETS)
        return Response(style, media_type="text/css", headers=_HEADERS)
    if name not in ("report.js", "explorer.js"):
        return _error(404, "There is no such file.")
    script = asset(name, ASSETS if name == "report.js" else _ASSETS)
    return Response(script, media_type="text/javascript", headers=_HEADERS)
