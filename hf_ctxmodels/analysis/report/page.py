"""A report: one HTML page without external resources.

Figures are inline SVG and readable without JavaScript. The script adds sorting of tables, texts of points by pointer
and keyboard, single heads of attention, and colors of tokens by a selected number. jinja2 escapes all texts, data of
the script is JSON in elements that browsers do not execute, and a content security policy allows this script alone.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import hf_ctxmodels
from hf_ctxmodels.analysis.figures import AttentionView, Figure, Heatmap, TokenComparison, escape_text, figure_style
from hf_ctxmodels.analysis.results import AnalysisResult, NotAnAnalysisError
from hf_ctxmodels.analysis.word_arguments import short_names
from hf_ctxmodels.core.console import print_status
from hf_ctxmodels.core.errors import CtxError

ASSETS = Path(__file__).parent / "assets"


def load_results(directory: str | Path) -> list[AnalysisResult]:
    """The results of all analyses in a directory, in the order of their file names. JSON files of other programs are
    skipped, with a line on screen.

    Raises:
        CtxError: There is no result, or one is damaged.
    """
    files = sorted(Path(directory).glob("*.json"))
    results = []
    for file in files:
        try:
            results.append(AnalysisResult.load(file))
        except NotAnAnalysisError:
            print_status(f"{file.name} is not the result of an analysis: skipped.")
    if not results:
        raise CtxError(
            "The directory has no results of analyses.",
            location=directory,
            hint="use the --output_dir of `hf-ctxmodels analyze` commands.",
        )
    return results


@dataclass
class FigureSeries:
    """Figures of one class whose names differ in a number at the end, such as layers; shown one at a time."""

    figures: list[Figure]

    @property
    def title(self) -> str:
        """Title of a single figure, or the common beginning of the titles."""
        titles = [figure.title for figure in self.figures]
        if len(titles) == 1:
            return titles[0]
        prefix = "".join(characters[0] for characters in takewhile(lambda c: len(set(c)) == 1, zip(*titles)))
        return re.sub(r"[\s,:(–-]+(layer)?[\s,:(–-]*$", "", prefix) or titles[0]


def figure_series(figures: Sequence[Figure]) -> list[FigureSeries]:
    """Figures, with successive ones joined whose names differ in the number at the end."""
    series: list[FigureSeries] = []
    keys: list[tuple[type, str] | None] = []
    for figure in figures:
        match = re.fullmatch(r"(.*?)[-_.]?\d+", figure.name)
        key = (type(figure), match[1]) if match else None
        if key and keys and keys[-1] == key:
            series[-1].figures.append(figure)
        else:
            series.append(FigureSeries([figure]))
            keys.append(key)
    return series


def figure_data(figure: Figure) -> dict[str, Any] | None:
    """The data that the script needs to show a figure; None if the SVG suffices."""
    if isinstance(figure, AttentionView):
        return {"words": figure.words, "attention": figure.attention}
    if isinstance(figure, TokenComparison):
        return {"tokens": figure.tokens, "columns": figure.columns, "texts": figure.texts, "digits": figure.digits}
    if isinstance(figure, Heatmap) and figure.is_compact:
        return {"rows": figure.rows, "columns": figure.columns, "values": figure.values, "digits": figure.digits}
    return None


def render_figure(figure: Figure) -> Markup:
    """A figure as an HTML element; `window.ctxReport.enhance(element)` of the script makes it interactive."""
    return Markup(_environment().get_template("figure.html").render(figure=figure))


def render_report(results: Sequence[AnalysisResult], *, title: str = "Analysis report") -> str:
    """The HTML page of results."""
    template = _environment().get_template("report.html")
    script = asset("report.js")
    models = list(dict.fromkeys(model for result in results for model in result.models))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return template.render(
        title=title,
        results=results,
        models=models,
        names=dict(zip(models, short_names(models))) if models else {},
        style=Markup(asset("report.css") + figure_style("function")),
        script=Markup(script),
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; "
        "form-action 'none'",
        version=hf_ctxmodels.__version__,
        date=date.today().isoformat(),
    )


def asset(name: str, folder: Path = ASSETS) -> str:
    """Text of a page, a style sheet or a script; by default of the report."""
    return (folder / name).read_text("utf-8")


@cache
def _environment() -> Environment:
    environment = Environment(
        autoescape=True,
        loader=FileSystemLoader(ASSETS),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "sort_keys": False}
    environment.globals.update(figure_series=figure_series, figure_data=figure_data)
    # characters that XML forbids, such as NUL, are invalid in HTML as well
    environment.filters.update(safe_text=lambda text: Markup(escape_text(text)), heading=_heading)
    return environment


def _heading(name: str) -> str:
    """Name of an analysis as a heading: "probe-pos" is "Probe pos"."""
    words = re.sub(r"[-_]+", " ", name)
    return words[:1].upper() + words[1:]
