"""Run models of this package with the tools around it, and write a page with a table of what works.

    pip install -c constraints.txt -e '.[ecosystem]'
    python scripts/check_ecosystem.py [--only TEXT] [--output docs/ecosystem.md]

Every check trains, exports, adapts, quantizes or explains a small model, and compares the outputs. A check is skipped with a
message if its package is not installed. Exits with 1 if a check fails.
"""

import argparse
import platform
import sys
import tempfile
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ecosystem_checks import CHECKS, Check, Workplace
from transformers import logging

PAGE = """\
# Tools around the models

`python scripts/check_ecosystem.py --output docs/ecosystem.md` generates this page. All checks ran on a CPU, with Python
{python}, torch {torch} and transformers {transformers}. They train, export, adapt, quantize or explain a small model
with random weights, and compare the outputs. To run the checks:

```sh
pip install $(grep '^torch==' constraints.txt)
pip install -c constraints.txt -e '.[ecosystem]'
python scripts/check_ecosystem.py
```

{table}

See also: [adapters](how-to/adapters.md), [evaluation with lm-evaluation-harness](how-to/evaluate.md),
[export](how-to/export.md), [quantization](how-to/quantize.md), [explainers](how-to/explain.md).
"""


def run(one: Check, place: Workplace) -> tuple[str, str]:
    """The outcome and a note of one check."""
    missing = [name for name in one.packages if not _version(name)]
    if missing:
        return "not run", f"{', '.join(missing)} is not installed"
    try:
        note = one.run(place)
    except Exception as error:  # whatever a tool raises is a row of the table
        traceback.print_exc()
        return "fails", f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"
    return "works with a note" if note else "works", note


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def row(one: Check, outcome: str, note: str) -> str:
    """A line of the table."""
    versions = ", ".join(f"{name} {_version(name)}" for name in one.packages if _version(name))
    checked = " ".join((one.run.__doc__ or "").split())
    return f"| {one.tool} | {versions} | {checked} | {outcome} | {note} |"


def main() -> None:
    """Run the checks, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="Run the checks with this text in the tool's name.")
    parser.add_argument("--output", type=Path, help="Markdown file to write the page to.")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    lines = ["| tool | versions | checked | result | note |", "|---|---|---|---|---|"]
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        place = Workplace(Path(folder))
        for one in CHECKS:
            if arguments.only.lower() not in one.tool.lower():
                continue
            outcome, note = run(one, place)
            outcomes.append(outcome)
            lines.append(row(one, outcome, note))
            print(lines[-1], flush=True)
    if arguments.output is not None:
        versions = {name: _version(name).partition("+")[0] for name in ("torch", "transformers")}
        page = PAGE.format(python=platform.python_version(), table="\n".join(lines), **versions)
        arguments.output.write_text(page, encoding="utf-8")
    if "fails" in outcomes:
        sys.exit(1)


if __name__ == "__main__":
    main()
