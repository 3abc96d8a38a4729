"""Download the common tests of transformers, which are not in the wheel, from the source distribution.

    python tests/transformers_suite/fetch.py FOLDER

requirements.txt pins the version and the checksum of the archive, which pip verifies. The tests are unpacked to
`FOLDER/transformers-VERSION/tests`; if they exist already, nothing is done.
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
    """An error with a message for the user, including the fix."""


def pinned_version(path: Path) -> str:
    """Version of transformers that a requirements file pins."""
    match = re.search(r"^transformers==([^\s;]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise FetchError(f"{path} does not pin transformers. Add the line `transformers==VERSION`.")
    return match[1]


def validated_version(requirements: Path = REQUIREMENTS, constraints: Path = CONSTRAINTS) -> str:
    """Version of the archive; raises FetchError if it is not installed or not in constraints.txt."""
    expected = pinned_version(requirements)
    versions = {str(constraints): pinned_version(constraints), "the environment": version("transformers")}
    for source, actual in versions.items():
        if actual != expected:
            raise FetchError(
                f"{requirements} pins transformers {expected}, but {source} has {actual}. Update the version and the "
                "SHA-256 of the source distribution in requirements.txt (`pip hash FILE` prints it), or install "
                f"transformers {expected}."
            )
    return expected


def tests_folder(root: Path) -> Path:
    """Folder of the tests of the pinned version below a scratch folder."""
    return root / f"transformers-{pinned_version(REQUIREMENTS)}" / "tests"


def fetch(root: Path) -> Path:
    """Download and unpack the tests below `root`, unless they exist; returns their folder or raises FetchError."""
    name = f"transformers-{validated_version()}"
    folder = root / name / "tests"
    if (folder / "__init__.py").is_file():
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "transformers"]
        command += ["--require-hashes", "--requirement", str(REQUIREMENTS), "--dest", scratch]
        if subprocess.run(command, check=False).returncode:
            raise FetchError(
                f"pip could not download the source distribution of {name}, see its message above. Check the access "
                f"to a package index; later runs use {folder}."
            )
        with tarfile.open(next(Path(scratch).glob(f"{name}.tar.gz"))) as archive:
            members = [member for member in archive if member.name.startswith(f"{name}/tests/")]
            archive.extractall(root, members, filter="data")
    (folder / "__init__.py").touch()  # not in the archive; created last, to mark complete unpacking
    return folder


def main() -> None:
    """Fetch the tests into the folder on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="Scratch folder, created if needed.")
    try:
        print(fetch(parser.parse_args().folder))
    except FetchError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
