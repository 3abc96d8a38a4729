"""HTML report: content, escaping, absence of external resources, and interaction in a browser."""

import base64
import hashlib
import json
import re
import subprocess
from html.parser import HTMLParser
from shutil import which
from typing import Any

import numpy as np
import pytest
from commands import command_output
from test_figures import FIGURES, HOSTILE

from hf_ctxmodels.analysis.figures import ScatterMap
from hf_ctxmodels.analysis.report.page import figure_series, render_report
from hf_ctxmodels.analysis.results import AnalysisResult, Table

SENTENCE = "<img src=x onerror=alert(1)> \"The' river 👩‍🚀 שלום"


class Page(HTMLParser):
    """Parser that collects the elements, texts and scripts of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.open_tags.append(tag)

    def handle_endtag(self, tag):
        while self.open_tags and self.open_tags.pop() != tag:
            pass

    def handle_data(self, data):
        is_script = bool(self.open_tags) and self.open_tags[-1] == "script"
        (self.scripts if is_script else self.texts).append(data)


@pytest.fixture(scope="module")
def results() -> list[AnalysisResult]:
    points = np.random.default_rng(0).normal(size=(6, 2))
    maps = [ScatterMap(f"sense-{i}", f"Senses, layer {i}", points, HOSTILE, [SENTENCE] * 6) for i in range(3)]
    cells, spreads = [[0.5, SENTENCE], [0.75, "b"], [None, "a"]], [[0.1, None]] * 3
    table = Table(
        "Accuracy", ["score", SENTENCE], [SENTENCE, "layer 1", "layer 2"], cells, spreads, "max", note=SENTENCE
    )
    settings = {"text": SENTENCE, "seeds": [1, 2], "layer": 3}
    return [
        AnalysisResult("probe-pos", ["bert", SENTENCE], settings, [table], FIGURES),
        AnalysisResult("senses", ["bert"], {}, [], maps),
    ]


def test_model_names_are_shortened():
    sources = ["/home/someone/runs/bert/model", "organization/gpt2"]
    page = Page(render_report([AnalysisResult("similarity", sources, {}, [], [])]))
    model_attributes = [attributes for _, attributes in page.elements if attributes.get("class") == "model"]
    assert [attributes["title"] for attributes in model_attributes] == sources * 2
    text = "".join(page.texts)
    assert "bert" in text
    assert "gpt2" in text
    assert "someone" not in text


def test_report_of_directory(results, tmp_path, capsys):
    for result in results:
        result.save(tmp_path / "analyses")
    (tmp_path / "analyses" / "notes.json").write_text("{}")
    output = tmp_path / "report.html"
    assert "2 results" in command_output("analyze report", tmp_path / "analyses", output=output, title=SENTENCE)
    page = Page(output.read_text())
    texts = "".join(page.texts)
    assert texts.count(SENTENCE) > 10
    for text in ("Probe pos", "Senses", "0.500 ± 0.100", "0.750 ± 0.100", *(figure.title for figure in FIGURES)):
        assert text in texts
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"img", "iframe", "link", "object", "embed", "form", "base", "image", "use", "foreignobject"}
    assert sum(tag == "script" and "type" not in attributes for tag, attributes in page.elements) == 1
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    references = [attributes[name] for _, attributes in page.elements for name in ("src", "href") if name in attributes]
    assert references
    assert all(reference.startswith("#") for reference in references)
    assert not re.search(r"https?:|@import|url\(", output.read_text())
    targets = {attributes.get("id") for _, attributes in page.elements}
    assert {reference[1:] for reference in references} <= targets
    [tokens] = [json.loads(text)["tokens"] for text in page.scripts if text.startswith('{"tokens"')]
    assert tokens == FIGURES[-1].tokens
    assert "exists" in command_output("analyze report", tmp_path / "analyses", output=output, fails=True)
    assert "no results" in command_output("analyze report", tmp_path, output=tmp_path / "other.html", fails=True)
    assert "no such directory" in command_output("analyze report", tmp_path / "x", output=output, fails=True)


def test_security_policy_allows_only_report_script(results):
    page = Page(render_report(results))
    policy = next(
        attributes["content"] for tag, attributes in page.elements if tag == "meta" and "http-equiv" in attributes
    )
    digest = base64.b64encode(hashlib.sha256(page.scripts[-1].encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}';")


def test_layer_figures_form_one_series(results):
    assert [len(series.figures) for series in figure_series(results[1].figures)] == [3]
    assert figure_series(results[1].figures)[0].title == "Senses"
    assert all(len(series.figures) == 1 for series in figure_series(FIGURES))


DRIVER = """
const log = {};
const key = (node, name) => node.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true }));
const point = (node) => node.dispatchEvent(new PointerEvent("pointerenter"));
const readout = (figure) => figure.querySelector(".readout").textContent;
const figureOf = (type) => document.querySelector(`figure[data-type="${type}"]`);
const change = (node, value, name) => { node.value = value; node.dispatchEvent(new Event(name)); };
const body = document.querySelector("table.sortable tbody");
const order = () => [...body.rows].map((row) => row.cells[1].textContent);
document.querySelectorAll("table.sortable thead button")[0].click();
log.descending = order();
document.querySelectorAll("table.sortable thead button")[0].click();
log.ascending = order();
const map = document.querySelector(".series figure");
key(map.querySelector(".scroll"), "ArrowRight");
log.first = readout(map);
key(map.querySelector(".scroll"), "ArrowRight");
log.second = readout(map);
change(map.querySelector("input"), "👩", "input");
log.matches = map.querySelectorAll(".point:not(.dim)").length;
change(document.querySelector(".series > .controls input"), 2, "input");
log.shown = [...document.querySelectorAll(".series figure")].map((figure) => !figure.hidden);
const attention = figureOf("AttentionView");
const [layer, head, view] = attention.querySelectorAll("select");
attention.querySelectorAll(".head")[4].dispatchEvent(new MouseEvent("click"));
log.head = [layer.value, head.value];
log.cells = attention.querySelectorAll(".attention td[title]").length;
change(head, "mean", "change");
change(view, "lines", "change");
attention.querySelector(".lines text").dispatchEvent(new FocusEvent("focus"));
log.attention = readout(attention);
const tokens = figureOf("TokenComparison");
change(tokens.querySelector("select"), "rank", "change");
log.numbers = [...tokens.querySelectorAll(".token small")].map((node) => node.textContent);
point(tokens.querySelector(".token"));
log.token = readout(tokens);
const square = document.querySelector(".cells").closest("figure");
key(square.querySelector(".scroll"), "ArrowDown");
log.cell = readout(square);
const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
const token = tokens.querySelector(".token");
log.contrasts = ["light", "dark"].flatMap((scheme) => ["accent", "second"].flatMap((color) => {
  document.documentElement.style.colorScheme = scheme;
  return [...Array(18).keys()].map((step) => {
    token.style.setProperty("--tint", `color-mix(in srgb, var(--${color}) ${5 * step}%, var(--card))`);
    const style = getComputedStyle(token);
    const background = luminance(style.backgroundColor.match(/[0-9.]+/g).map(Number));
    return style.color.startsWith("lch(100") ? 1.05 / (background + 0.05) : (background + 0.05) / 0.05;
  });
}));
const names = [...document.querySelectorAll("table.sortable .row-name")].map((node) => node.offsetWidth / innerWidth);
log.rowName = Math.max(...names);
const region = map.querySelector(".scroll");
map.hidden = false;
region.style.width = "200px";
for (let i = 0; i < 6; i++) key(region, "ArrowRight");
const [ring, visible] = [map.querySelector(".ring"), region].map((node) => node.getBoundingClientRect());
log.ringIsVisible = ring.left >= visible.left - 1 && ring.right <= visible.right + 1;
const titleOf = () => getComputedStyle(map, "::before").content;
log.titles = [titleOf()];
document.querySelector(".series > .controls").remove(); // as without scripts
log.titles.push(titleOf());
document.getElementById("theme").click();
log.scheme = document.documentElement.style.colorScheme;
log.overflow = document.documentElement.scrollWidth - innerWidth;
document.body.replaceChildren(JSON.stringify(log));
"""


@pytest.fixture(scope="module")
def dump_page(tmp_path_factory):
    """Open a page in a headless browser and return its DOM after its scripts have run."""
    folder = tmp_path_factory.mktemp("browser")
    browser: Any = which("chromium") or which("google-chrome")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--dump-dom"]

    def dump(page: str, width: int = 1200) -> str:
        (folder / "page.html").write_text(page)
        command = [browser, *flags, f"--window-size={width},900", (folder / "page.html").as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

    try:
        dump("")
    except (TypeError, subprocess.SubprocessError) as error:
        pytest.skip(f"needs chromium, which does not start: {error}")
    return dump


@pytest.mark.slow
def test_report_in_browser(results, dump_page):
    page = render_report(results)
    assert dump_page(page).count('class="controls"') == 8  # the security policy allows the script
    page = re.sub("<meta http-equiv[^>]*>", "", page).replace("</body>", f"<script>{DRIVER}</script></body>")
    log = json.loads("".join(Page(dump_page(page, 500).partition("<body>")[2]).texts))
    assert log["descending"] == ["0.750 ± 0.100", "0.500 ± 0.100", "–"]
    assert log["ascending"] == ["0.500 ± 0.100", "0.750 ± 0.100", "–"]
    maps = results[1].figures
    by_x = sorted(range(6), key=lambda index: maps[0].points[index][0])
    for name, index in (("first", by_x[0]), ("second", by_x[1])):
        assert log[name] == f"{maps[0].groups[index]}: {SENTENCE}".replace("\x00", "\ufffd")
    assert log["matches"] == 6
    assert log["shown"] == [False, False, True]
    assert (log["head"], log["cells"]) == (["1", "1"], 36)
    assert log["attention"].startswith(f"{HOSTILE[0]} → {HOSTILE[0]} 0.17, ")
    assert log["numbers"] == ["1", "20", "3", "–", "5", "6"]
    assert log["token"].startswith(f"{HOSTILE[0]}  log P <: -1.50 · rank: 1")
    assert log["cell"] == "<m> 1, x: 0"
    assert min(log["contrasts"]) >= 4.5  # WCAG AA
    assert len(log["contrasts"]) == 72
    assert log["rowName"] <= 0.46  # row names stay in view, numbers scroll
    assert log["ringIsVisible"]
    assert log["titles"] == ["none", '"Senses, layer 0"']
    assert log["scheme"] in ("dark", "light")
    assert log["overflow"] <= 0  # no horizontal scrolling
