"""Fetches the common tests of transformers, which its wheel does not carry, from its source distribution.

    python tests/peer/fetch.py FOLDER

The version and the checksum of the archive are in requirements.txt, and pip refuses any other. The folder afterwards
holds `transformers-VERSION/tests`; a second call finds it and does nothing.
"""

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
CONSTRAINTS = HERE.parents[1] / "constraints.txt"


class FetchError(Exception):
    """What went wrong, and how to mend it."""


def pinned_version(path: Path) -> str:
    """The version of transformers in a requirements file."""
    found = re.search(r"^transformers==([^\s;]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise FetchError(f"{path} pins no version of transformers. Write the line `transformers==VERSION`.")
    return found[1]


def checked_version(requirements: Path = REQUIREMENTS, constraints: Path = CONSTRAINTS) -> str:
    """The version of the archive, which is the one that is installed and the one in constraints.txt.

    Raises:
        FetchError: The three differ.
    """
    wanted = pinned_version(requirements)
    others = {str(constraints): pinned_version(constraints), "the environment": version("transformers")}
    for where, found in others.items():
        if found != wanted:
            raise FetchError(
                f"{requirements} has transformers {wanted}, {where} has {found}. Write the version and the SHA-256 of "
                "its source distribution into requirements.txt (`pip hash FILE` prints it), or install the other one."
            )
    return wanted


def tests_folder(root: Path) -> Path:
    """Where the tests of the pinned version lie below a scratch folder."""
    return root / f"transformers-{pinned_version(REQUIREMENTS)}" / "tests"


def fetch(root: Path) -> Path:
    """Download and unpack the tests below `root`, unless they are there; gives their folder.

    Raises:
        FetchError: The versions differ, or pip could not download the archive.
    """
    name = f"transformers-{checked_version()}"
    folder = root / name / "tests"
    if (folder / "__init__.py").is_file():
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "transformers"]
        command += ["--require-hashes", "--requirement", str(REQUIREMENTS), "--dest", scratch]
        if subprocess.run(command, check=False).returncode:
            raise FetchError(
                f"pip could not download the source distribution of {name}; its own message is above. It needs a "
                f"package index, once: afterwards the tests lie in {folder}."
            )
        with tarfile.open(next(Path(scratch).glob(f"{name}.tar.gz"))) as archive:
            members = [member for member in archive if member.name.startswith(f"{name}/tests/")]
            archive.extractall(root, members, filter="data")
    (folder / "__init__.py").touch()  # last: its presence says that all is unpacked; the archive leaves it out
    return folder


def main() -> None:
    """Fetch into the folder that is named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="scratch folder; it is created if needed")
    try:
        print(fetch(parser.parse_args().folder))
    except FetchError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
