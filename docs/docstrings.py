"""Convert docstrings of the package to reStructuredText: sections, lists, tables and inline code.

A docstring is Markdown with sections of indented items (`Args:`, `Returns:`, `Each feature holds:`). Inline code that
names a documented object becomes a link to it.
"""

import re
from collections.abc import Callable, Iterator, Mapping

# "name, other_name: description"; names may contain parts of signatures
_ITEM = re.compile(r"(?P<names>[\w*.`]+(?:, [\w*.`]+)*)(?: \((?P<type>[^()]*)\))?: (?P<description>.*)")
_HEADER = re.compile(r"(?P<head>[A-Z][\w-]*(?: [\w-]+)*)(?P<rest>:.*|, .*:)$")
_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_BULLET = re.compile(r"(?:- |\d+\. )")

Lines = list[str]


def to_rst(text: str, links: Mapping[str, str]) -> str:
    """Convert a docstring without indentation to reStructuredText.

    Args:
        text: The docstring.
        links: Short name as used in docstrings -> full name of the documented object.
    """
    return "\n".join(line.rstrip() for line in _blocks(text.splitlines(), lambda line: _inline(line, links)))


def _blocks(lines: Lines, inline: Callable[[str], str], nested: bool = False) -> Iterator[str]:
    """Yield converted blocks separated by empty lines; section headers are recognized only at the outermost level."""
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
        elif lines[0].startswith(" "):  # a command line example or a continuation line
            block, lines = _split(lines, lambda line: line.startswith(" ") or not line.strip())
            yield from [".. code-block:: text", "", *(f"    {line}" for line in _dedented(block))]
        elif _BULLET.match(lines[0]):
            width = _BULLET.match(lines[0]).end()  # type: ignore[union-attr]
            block, rest = _split(lines[1:], lambda line: line.startswith(" ") or not line.strip())
            bullet, first = lines[0][:width], lines[0][width:]
            body = list(_blocks([first, *_dedented(block)], inline, nested=True))
            yield from [bullet + body[0], *(" " * width + line for line in body[1:])]
            lines = rest
        elif not nested and _is_header(lines):
            block, rest = _split(lines[1:], lambda line: line.startswith(" ") or not line.strip())
            yield from _section(lines[0], _dedented(block), inline)
            lines = rest
        else:
            block, lines = _split(lines, lambda line: not re.match(r"\s|\||>>> |- |\d+\. |$", line), min_lines=1)
            yield inline(" ".join(block))
        yield ""


def _split(lines: Lines, is_inside: Callable[[str], bool], min_lines: int = 0) -> tuple[Lines, Lines]:
    """Split after the leading lines for which `is_inside` is true, but not before `min_lines` lines."""
    stop = next((index for index, line in enumerate(lines) if index >= min_lines and not is_inside(line)), len(lines))
    return lines[:stop], lines[stop:]


def _dedented(lines: Lines) -> Lines:
    depth = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return [line[depth:] for line in lines]


def _is_header(lines: Lines) -> bool:
    """Whether the first line is a section header such as "Args:", with indented lines below."""
    below = next((line for line in lines[1:] if line.strip()), "")
    return bool(_HEADER.match(lines[0])) and below.startswith(" ")


def _section(header: str, body: Lines, inline: Callable[[str], str]) -> Iterator[str]:
    """Convert a section to a field with the rest of the header line and a list of items."""
    match = _HEADER.match(header)
    assert match is not None
    rest = match["rest"].strip(" :")
    yield f":{match['head']}:"
    content = [inline(rest.removeprefix(", ")), ""] if rest else []
    if any(line.startswith((">>> ", "...")) for line in body):
        content += _blocks(body, inline, nested=True)
    else:
        content += _items(body, inline)
    yield from (f"    {line}" if line else "" for line in content)


def _items(body: Lines, inline: Callable[[str], str]) -> Iterator[str]:
    """Convert `name: description` lines to a list and other lines to paragraphs."""
    while body:
        first = body[0]
        below, rest = _split(body[1:], lambda line: line.startswith(" ") or not line.strip())
        item = _ITEM.fullmatch(first)
        if item:
            names = ", ".join(f"``{name.strip('`')}``" for name in item["names"].split(", "))
            type_ = f" ({inline(item['type'])})" if item["type"] else ""
            text = list(_blocks([item["description"], *_dedented(below)], inline, nested=True))
            yield f"- {names}{type_}: {text[0]}"
            yield from (f"  {line}" for line in text[1:])
            body = rest
        else:
            block, body = _split(body, lambda line: not _ITEM.fullmatch(line), min_lines=1)
            yield from _blocks(block, inline, nested=True)


def _cells(row: str) -> Lines:
    """Cells of a table row."""
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row.strip().strip("|"))]


def list_table(rows: list[Lines], inline: Callable[[str], str]) -> Lines:
    """Table with one header row."""
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
    # the colon: `FILE:name` would be a link, as `file:` is the scheme of an address
    return re.sub(r"([\\*|`]|_(?!\w)|(?<=\w):(?=\w))", r"\\\1", text)
