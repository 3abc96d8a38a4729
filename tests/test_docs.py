"""The documentation site: generated pages cover all code, and broken links fail the build."""

import importlib
import pydoc
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import command_output, run_command

from hf_ctxmodels.cli.recipes import first_sentence
from hf_ctxmodels.core.command_line import parse_arguments
from hf_ctxmodels.core.errors import CtxError
from hf_ctxmodels.registry import FAMILIES
from hf_ctxmodels_cli import find_command

ROOT = Path(__file__).resolve().parents[1]
MAX_COLUMNS = 98
BASH = shutil.which("bash") or "bash"
RECORDED_PROGRAMS = ("hf-ctxmodels", "accelerate", "python")
PAGES_WITH_COMMANDS = ("README.md", "docs/**/*.md", "model_cards/**/*.md")
DOCSTRING = """Pads rows of FILE:name=X, see http://host/path.

Each feature holds:
    input_ids, labels: (tokens,), see `Thing`; a
        second line with 2 * 3 | 4_.
    other (optional): Or a list:
        - one

| a | b |
|---|---|
| `x` | y |

Args: arguments of `Other`s, and
    width: A number.

Example:
    >>> pad([1])
    1
"""
RST = """Pads rows of FILE\\:name=X, see http://host/path.

:Each feature holds:
    - ``input_ids``, ``labels``: (tokens,), see :py:obj:`Thing <m.Thing>`; a second line with 2 \\* 3 \\| 4\\_.
    - ``other`` (optional): Or a list:

      - one

.. list-table::
    :header-rows: 1

    * - a
      - b
    * - ``x``
      - y

:Args:
    arguments of ``Other``\\ s, and

    - ``width``: A number.

:Example:
    >>> pad([1])
    1
"""


class ParsedError(Exception):
    """Raised when the arguments of a command are parsed."""


@pytest.fixture(scope="module")
def docs():
    """A function that imports a module of `docs/`, as the build does."""
    sys.path.insert(0, str(ROOT / "docs"))
    yield importlib.import_module
    sys.path.remove(str(ROOT / "docs"))


@pytest.fixture(scope="module")
def pages(docs) -> dict[str, str]:
    return docs("generated_pages").pages()


def test_docstring_to_restructured_text(docs):
    text = docs("docstrings").to_rst(DOCSTRING, {"Thing": "m.Thing"})
    assert [line for line in text.splitlines() if line] == [line for line in RST.splitlines() if line]


def test_objective_pages_document_all_options(pages):
    for family in FAMILIES.values():
        assert {f"families/{family.name}.md", f"api/models/{family.name}.rst"} <= pages.keys()
        for name, objective in family.objectives.items():
            page = pages[f"objectives/{objective.__name__}.rst"]
            assert re.search(rf"``--objective {re.escape(name)}`` of [^;]*:doc:`/families/{family.name}`", page), name
            options = dict(re.findall(r"^\.\. option:: (\w+)=(.*)\n\n    (?=\S)", page, re.MULTILINE))
            expected = {option: text.rpartition("Default: ")[2] for option, text in objective.option_help().items()}
            assert {option: f"{default}." for option, default in options.items()} == expected, objective.__name__


def test_command_pages_document_all_flags(docs, pages, capsys):
    commands = [*docs("generated_pages").leaf_commands()]
    assert commands
    for command in commands:
        assert run_command(*command.split(), "--help") == 0
        flags = set(re.findall(r"^  (?:-h, )?--(\w+)", capsys.readouterr().out, re.MULTILINE)) - {"help", "recipe"}
        page = pages[f"commands/{command.replace(' ', '-')}.rst"]
        assert set(re.findall(r"^\.\. option:: --(\w+).*\n\n    \S", page, re.MULTILINE)) == flags, command


def test_pages_cover_all_recipes_and_modules(pages):
    recipes = [path.read_text("utf-8").rstrip() for path in ROOT.glob("scripts/recipes/*.yaml")]
    assert len(recipes) > 40
    assert [text for text in recipes if text not in pages["_parts/recipes.md"]] == []
    reference = "".join(text for name, text in pages.items() if name.startswith("api/"))
    documented_modules = set(re.findall(r"^\.\. automodule:: (\S+)", reference, re.MULTILINE))
    for path in (ROOT / "hf_ctxmodels").glob("*/**/*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if not module.startswith("hf_ctxmodels.cli"):
            is_compiled = re.search("numba|^import triton", path.read_text("utf-8"), re.MULTILINE)
            assert module in documented_modules or is_compiled, module


def shell_commands(page: Path, folder: Path) -> list[tuple[str, ...]]:
    """Distinct commands of the shell examples of a page, with variables and loops expanded; none of them runs."""
    blocks = re.findall(r"^ *```(?:bash|sh)\n(.*?)^ *```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    recorded = "".join(f"{name}() {{ printf '%s\\0' {name} \"$@\"; printf '\\n\\0'; }}\n" for name in RECORDED_PROGRAMS)
    code = f"{recorded}command_not_found_handle() {{ :; }}\n" + "\n".join(blocks)
    environment = {"PATH": str(folder)}
    result = subprocess.run([BASH, "--norc", "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    commands = [tuple(command.split("\0")[:-1]) for command in result.stdout.split("\n\0")]
    return [command for command in dict.fromkeys(commands) if command]


def parse_command(arguments: list[str]) -> None:
    """Parse the flags of a command without running it.

    Raises:
        UnknownCommandError: There is no such command.
        CtxError: A flag, recipe or value does not exist.
    """
    words, command = find_command(arguments)
    module = importlib.import_module(f"hf_ctxmodels.cli.{command.module}")

    def parse_and_stop(*sections: Any, **options: Any) -> None:
        parse_arguments(*sections, **options)
        raise ParsedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "parse_arguments", parse_and_stop)
        patch.setattr(sys, "argv", [" ".join(words), *arguments[len(words) :]])
        with pytest.raises(ParsedError):
            getattr(module, command.function)(*command.arguments)


@pytest.mark.parametrize("pattern", PAGES_WITH_COMMANDS)
def test_shell_commands_parse(pattern, tmp_path, monkeypatch):
    """All commands, flags, recipes and types of values exist; the commands do not run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "analyses").mkdir()  # `analyze report` checks that it exists
    count = 0
    for page in ROOT.glob(pattern):
        for name, *arguments in shell_commands(page, tmp_path):
            if name == "accelerate":
                arguments = arguments[arguments.index("hf_ctxmodels") + 1 :] if "hf_ctxmodels" in arguments else []
            if name == "python" or not arguments or {"--help", "..."} & set(arguments):
                continue
            for argument in arguments:
                if re.fullmatch(r"\w[\w-]*\.[\w.]+", argument):
                    (tmp_path / argument).touch()  # some commands check that their inputs exist
            try:
                parse_command(arguments)
            except CtxError as error:
                pytest.fail(f"{page.relative_to(ROOT)}: hf-ctxmodels {shlex.join(arguments)}\n{error}")
            count += 1
    assert count


def test_script_flags_exist(tmp_path):
    pages = [page for pattern in PAGES_WITH_COMMANDS for page in ROOT.glob(pattern)]
    commands = [command[1:] for page in pages for command in shell_commands(page, tmp_path) if command[0] == "python"]
    flags: dict[str, set[str]] = {}
    for script, *arguments in commands:
        if script.startswith("scripts/"):
            flags.setdefault(script, set()).update(re.findall(r"^--\w+$", "\n".join(arguments), re.MULTILINE))
    assert len(flags) > 4
    for script, used_flags in flags.items():
        help_text = command_output(ROOT / script, "--help")
        assert used_flags - set(re.findall(r"^  (--\w+)", help_text, re.MULTILINE)) == set(), script


def test_readme_links_reproduction_sections():
    card = (ROOT / "model_cards" / "reproduction.md").read_text("utf-8")
    readme = (ROOT / "README.md").read_text("utf-8")
    sections = {re.sub(r"\W+", "-", title.lower()) for title in re.findall("^## (.*)", card, re.MULTILINE)}
    linked = set(re.findall(r"model_cards/reproduction\.md#([\w-]+)", readme))
    assert linked == sections
    assert set(re.findall(r"\]\(#([\w-]+)\)", card)) == linked


def test_recipe_summaries_are_complete_sentences(docs):
    for path in ROOT.glob("scripts/*/*.yaml"):
        summary = first_sentence(path)
        comment = " ".join(line.lstrip("# ") for line in path.read_text("utf-8").splitlines() if line.startswith("#"))
        assert re.match(rf"{re.escape(summary.removesuffix('.'))}[.:]( |$)", comment), path
        assert summary.count("(") == summary.count(")"), path
    assert "the remaining 10% of the steps" in first_sentence(ROOT / "scripts" / "recipes" / "bert_base_512.yaml")


def test_objective_titles_are_words(docs, pages):
    title = docs("generated_pages").objective_title
    titles = {objective.__name__: title(objective) for objective in docs("reference").objectives()}
    assert titles["MaskedLMWithNextSentence"] == "Masked language modeling with next sentence"
    assert [text for text in titles.values() if not re.fullmatch(r"[A-Z][a-z-]+( [a-z]+)*", text)] == []
    assert all(pages[f"objectives/{name}.rst"].startswith(text) for name, text in titles.items())


@pytest.mark.parametrize("pattern", PAGES_WITH_COMMANDS)
def test_code_blocks_fit_page_width(pattern):
    """At 1280 pixels a line has room for 98 characters; `text` blocks are output, and may be longer.

    The template of cards is a Jinja template, whose code depends on the model.
    """
    paths = [path for path in ROOT.glob(pattern) if path.name != "template.md"]
    assert paths
    for path in paths:
        blocks = re.findall(r"^ *```(?!text|\n)[^\n]*\n(.*?)^ *```", path.read_text("utf-8"), re.DOTALL | re.MULTILINE)
        assert [line for block in blocks for line in block.splitlines() if len(line) > MAX_COLUMNS] == [], path


def test_model_card_links_are_adapted(docs):
    adapt_links = docs("generated_pages").adapt_links
    text = "[a](glove.md#speed) [b](experiments/bert.md) [c](README.md) [d](template.md) ![e](bert_learning.png) [f](http://g)"
    assert adapt_links(text, "model_cards/bert.md", "families/bert.md") == (
        "[a](../families/glove.md#speed) [b](../families/experiments/bert.md) [c](../families/index.md) d "
        "![e](../families/bert_learning.png) [f](http://g)"
    )


def test_broken_link_fails_build(docs, tmp_path, capfd):
    for package in ("sphinx", "myst_nb", "pydata_sphinx_theme", "sphinx_copybutton"):
        pytest.importorskip(package, reason="needs the extra `docs`")
    build = docs("build").build
    pages = {
        "valid": "# A\n\n[b](index.md#a)\n",
        "anchor": "# A\n\n[b](index.md#b)\n",
        "page": "# A\n\n[b](missing.md)\n",
        "html": '# A\n\n<a href="index.html#b">b</a>\n',
        "host": '# A\n\n<img src="https://example.com/b.png">\n',
        "scheme": '# A\n\n<a href="FILE:b">b</a>\n',
    }
    codes = {}
    for name, text in pages.items():
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(ROOT / "docs" / "conf.py", folder)
        shutil.copytree(ROOT / "docs" / "_static", folder / "_static")
        (folder / "index.md").write_text(text)
        codes[name] = build(folder, tmp_path / f"{name}-site")
    assert {name for name, code in codes.items() if code} == set(pages) - {"valid"}, capfd.readouterr().err
    page = (tmp_path / "valid-site" / "index.html").read_text("utf-8")
    assert 'rel="icon" href="_static/favicon.svg"' in page
    assert 'data-default-mode="auto"' in page  # the script of the theme reports an empty mode as an error


def test_names_in_tour_exist():
    page = (ROOT / "docs" / "tour.md").read_text("utf-8")
    names = re.findall(r"`((?:[a-z_]+\.)+[A-Za-z_]+)`", page)
    names = [name for name in names if name.partition(".")[0] not in ("torch", "transformers")]
    assert len(names) > 20
    assert [name for name in names if pydoc.locate(f"hf_ctxmodels.{name}") is None] == []
