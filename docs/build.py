"""Build the site: `python docs/build.py` writes it to `site/`.

A warning of Sphinx is an error, and so is a broken link.

The pages written by hand and those that `made_pages` makes are laid out in `build/docs` first; Sphinx's messages name
the files there.
"""

import argparse
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from check_links import broken_links  # noqa: E402
from made_pages import images, pages  # noqa: E402
from sphinx.cmd.build import build_main  # noqa: E402

SOURCE = HERE.parent / "build" / "docs"
_STRICT = ("--fail-on-warning", "--quiet", "--jobs", "auto")


def lay_out(folder: Path) -> None:
    """Write everything that Sphinx reads to a folder.

    Raises:
        FileExistsError: A page written by hand has the name of a generated one.
    """
    made = {name: text.encode() for name, text in pages().items()}
    made |= {name: file.read_bytes() for name, file in images().items()}
    shutil.copytree(HERE, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    for name, content in made.items():
        path = folder / name
        if path.exists():
            raise FileExistsError(f"docs/{name} is written by hand, and generated too.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def build(source: Path, output: Path) -> int:
    """Run Sphinx on a folder of pages, and check the links; 0, or another exit code after a warning or an error."""
    code = build_main([*_STRICT, "-d", str(source / ".doctrees"), str(source), str(output)])
    broken = broken_links(output)
    print("\n".join(broken), file=sys.stderr, end="\n" if broken else "")
    return code or bool(broken)


def main() -> int:
    """Lay the pages out anew and build them; the exit code of Sphinx."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE.parent / "site", help="where the site is written")
    arguments = parser.parse_args()
    shutil.rmtree(SOURCE, ignore_errors=True)
    lay_out(SOURCE)
    return build(SOURCE, arguments.output)


if __name__ == "__main__":
    sys.exit(main())
