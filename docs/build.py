"""Build the site: `python docs/build.py` builds it in `site/`.

Sphinx warnings and broken links are errors.

Handwritten and generated pages are first copied to `build/docs`; messages of Sphinx refer to these files.
"""

import argparse
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from check_links import broken_links  # noqa: E402
from generated_pages import images, pages  # noqa: E402
from sphinx.cmd.build import build_main  # noqa: E402

SOURCE = HERE.parent / "build" / "docs"
_STRICT = ("--fail-on-warning", "--quiet", "--jobs", "auto")


def write_sources(folder: Path) -> None:
    """Write all sources for Sphinx to a folder.

    Raises:
        FileExistsError: A handwritten page has the name of a generated page.
    """
    generated = {name: text.encode() for name, text in pages().items()}
    generated |= {name: file.read_bytes() for name, file in images().items()}
    shutil.copytree(HERE, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    for name, content in generated.items():
        path = folder / name
        if path.exists():
            raise FileExistsError(f"docs/{name} is both handwritten and generated.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def build(source: Path, output: Path) -> int:
    """Run Sphinx and check the links; returns 0, or another exit code after a warning or an error."""
    code = build_main([*_STRICT, "-d", str(source / ".doctrees"), str(source), str(output)])
    broken = broken_links(output)
    print("\n".join(broken), file=sys.stderr, end="\n" if broken else "")
    return code or bool(broken)


def main() -> int:
    """Write the sources, build the site, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE.parent / "site", help="output folder")
    arguments = parser.parse_args()
    shutil.rmtree(SOURCE, ignore_errors=True)
    write_sources(SOURCE)
    return build(SOURCE, arguments.output)


if __name__ == "__main__":
    sys.exit(main())
