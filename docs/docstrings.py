"""Docstrings of the package as reStructuredText: sections, lists, tables and inline code as they are written there.

A docstring is Markdown with sections of indented items (`Args:`, `Returns:`, `Each feature holds:`). Inline code that
is the name of something documented becomes a link to it.
"""

import re
from collections.abc import Callable, Iterator, Mapping

# "name, other_name: what they are", with the pieces of signatures that such names may hold
_ITEM = re.compile(r"(?P<names>[\w*.`]+(?:, [\w*.`]+)*)(?: \((?P<kind>[^()]*)\))?: (?P<what>.*)")
_HEADER = re.compile(r"(?P<head>[A-Z][\w-]*(?: [\w-]+)*)(?P<rest>:.*|, .*:)$")
_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_BULLET = re.compile(r"(?:- |\d+\. )")

Lines = list[str]


def to_rst(text: str, links: Mapping[str, str]) -> str:
    """A docstring, its indentation already removed, as reStructuredText.

    Args:
        text: The docstring.
        links: Name as docstrings write it -> full name of the documented object.
    """
    return "\n".join(line.rstrip() for line in _blocks(text.splitlines(), lambda words: _inline(words, links)))


def _blocks(lines: Lines, inline: Callable[[str], str], nested: bool = False) -> Iterator[str]:
    """Block after block, each followed by an empty line; headers of sections are known at the outermost level only."""
    while lines:
        if not lines[0].strip():
            lines = lines[1:]
            continue
        if lines[0].startswith("|"):
            block, lines = _split(lines, lambda line: line.startswith("|"))
            yield from list_table([_cells(row) for row in block if not set(row) <= set("|-: ")], inline)
        elif lines[0].startswith(">>> "):
            block, lines = _split(lines, lambda line: bool(line.strip()))
            yield from block
        elif lines[0].startswith(" "):  # an example of a command line, or what continues a line above it
            block, lines = _split(lines, lambda line: line.startswith(" ") or not line.strip())
            yield from [".. code-block:: text", "", *(f"    {line}" for line in _dedented(block))]
        elif _BULLET.match(lines[0]):
            width = _BULLET.match(lines[0]).end()  # type: ignore[union-attr]
            block, rest = _split(lines[1:], lambda line: line.startswith(" ") or not line.strip())
            mark, first = lines[0][:width], lines[0][width:]
            body = list(_blocks([first, *_dedented(block)], inline, nested=True))
            yield from [mark + body[0], *(" " * width + line for line in body[1:])]
            lines = rest
        elif not nested and _is_header(lines):
            block, rest = _split(lines[1:], lambda line: line.startswith(" ") or not line.strip())
            yield from _section(lines[0], _dedented(block), inline)
            lines = rest
        else:
            block, lines = _split(lines, lambda line: not re.match(r"\s|\||>>> |- |\d+\. |$", line), least=1)
            yield inline(" ".join(block))
        yield ""


def _split(lines: Lines, inside: Callable[[str], bool], least: int = 0) -> tuple[Lines, Lines]:
    """The first lines for which `inside` holds, and the others."""
    stop = next((at for at, line in enumerate(lines) if at >= least and not inside(line)), len(lines))
    return lines[:stop], lines[stop:]


def _dedented(lines: Lines) -> Lines:
    depth = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return [line[depth:] for line in lines]


def _is_header(lines: Lines) -> bool:
    """Whether the first line begins a section: "Args:", or with words after it, and items below."""
    below = next((line for line in lines[1:] if line.strip()), "")
    return bool(_HEADER.match(lines[0])) and below.startswith(" ")


def _section(header: str, body: Lines, inline: Callable[[str], str]) -> Iterator[str]:
    """A section as a field: its name, the rest of its line, and its items as a list."""
    found = _HEADER.match(header)
    assert found is not None
    rest = found["rest"].strip(" :")
    yield f":{found['head']}:"
    content = [inline(rest.removeprefix(", ")), ""] if rest else []
    if any(line.startswith((">>> ", "...")) for line in body):
        content += _blocks(body, inline, nested=True)
    else:
        content += _items(body, inline)
    yield from (f"    {line}" if line else "" for line in content)


def _items(body: Lines, inline: Callable[[str], str]) -> Iterator[str]:
    """`name: what` lines as a list; other lines as paragraphs."""
    while body:
        first = body[0]
        below, rest = _split(body[1:], lambda line: line.startswith(" ") or not line.strip())
        item = _ITEM.fullmatch(first)
        if item:
            names = ", ".join(f"``{name.strip('`')}``" for name in item["names"].split(", "))
            kind = f" ({inline(item['kind'])})" if item["kind"] else ""
            text = list(_blocks([item["what"], *_dedented(below)], inline, nested=True))
            yield f"- {names}{kind}: {text[0]}"
            yield from (f"  {line}" for line in text[1:])
            body = rest
        else:
            block, body = _split(body, lambda line: not _ITEM.fullmatch(line), least=1)
            yield from _blocks(block, inline, nested=True)


def _cells(row: str) -> Lines:
    """The cells of a table's row."""
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row.strip().strip("|"))]


def list_table(rows: list[Lines], inline: Callable[[str], str]) -> Lines:
    """A table with one row of headings."""
    lines = [".. list-table::", "    :header-rows: 1", ""]
    for row in rows:
        for number, cell in enumerate(row):
            lines.append(f"    {'* -' if number == 0 else '  -'} {inline(cell)}".rstrip())
    return lines


def _inline(text: str, links: Mapping[str, str]) -> str:
    """Inline code as a literal or a link; what is markup in reStructuredText alone is escaped."""
    parts, end = [], 0
    for code in _CODE.finditer(text):
        parts.append(_escaped(text[end : code.start()]))
        joined_before = "\\ " if re.match(r"[\w]", text[: code.start()][-1:]) else ""
        joined_after = "\\ " if re.match(r"[\w]", text[code.end() :][:1]) else ""
        parts.append(joined_before + _code(code[1], links) + joined_after)
        end = code.end()
    return "".join([*parts, _escaped(text[end:])])


def _code(text: str, links: Mapping[str, str]) -> str:
    target = links.get(text.removesuffix("()"))
    return f":py:obj:`{text} <{target}>`" if target else f"``{text.strip() or text}``"


def _escaped(text: str) -> str:
    return re.sub(r"([\\*|`]|_(?!\w))", r"\\\1", text)
