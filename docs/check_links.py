"""Check that the internal links of the built site point to existing files and anchors."""

from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_ATTRIBUTES = {"a": "href", "link": "href", "img": "src", "script": "src"}


class _Page(HTMLParser):
    """Links, loaded resources and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.anchors = {"", "top"}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        target = values.get(_ATTRIBUTES.get(tag, ""))
        if target is not None:
            self.links.add(target)
            if tag != "a" and values.get("rel") != "canonical":
                self.loaded.add(target)


def broken_links(site: Path) -> list[str]:
    """Messages for broken internal links and for resources loaded from other hosts."""
    parse_page = cache(_Page)
    messages = []
    for path in sorted(path for path in site.rglob("*.html") if "_static" not in path.parts):
        page = parse_page(path)
        messages += [f"{path.relative_to(site)} loads {url}" for url in sorted(page.loaded) if urlsplit(url).netloc]
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme not in ("", "http", "https", "mailto"):
                messages.append(f"{path.relative_to(site)} links to {link}: not a web address")
            if parts.scheme or parts.netloc:
                continue
            target = path.parent / unquote(parts.path) if parts.path else path
            if not target.is_file():
                messages.append(f"{path.relative_to(site)} links to {link}: no such file")
            elif target.suffix == ".html" and unquote(parts.fragment) not in parse_page(target.resolve()).anchors:
                messages.append(f"{path.relative_to(site)} links to {link}: no such anchor")
    return messages
