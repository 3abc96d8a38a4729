"""A family added to a copy of the repository by following CONTRIBUTING.md passes the common tests."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FAMILY = "newt"
# A sample of the common tests; they pick up the new family automatically.
TEST_FILES = [f"tests/models/test_common{suffix}.py" for suffix in ("", "_layouts", "_training")]
SELECTED_TESTS = (
    "newt and (round_trip or auto_class or same_outputs or published or test_outputs or full_logits or each_target)"
)

COPIED_PACKAGE_TEST = """
from pathlib import Path
import hf_ctxmodels

def test_outputs_are_of_the_copy():
    assert Path(hf_ctxmodels.__file__).parent == Path({!r})
    assert hf_ctxmodels.CtxNewtForMaskedLM.__name__ == "CtxNewtForMaskedLM"
    assert hf_ctxmodels.get_family("newt").name == "newt"
"""


def copy_repository(folder: Path) -> Path:
    repository = folder / "repository"
    for name in ("hf_ctxmodels", "tests", "scripts", "model_cards"):
        shutil.copytree(ROOT / name, repository / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, repository / name)
    return repository


def follow_contributing(repository: Path) -> list[str]:
    """Write the code blocks to the files they name and register the family as in step 6; returns the files."""
    page = (repository / "CONTRIBUTING.md").read_text("utf-8")
    files = []
    for name, code in re.findall(r"^```python\n# (\S+)\n(.*?)^```", page, re.DOTALL | re.M):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text(code, "utf-8")
        files.append(name)
    registry = repository / "hf_ctxmodels" / "registry.py"
    text = registry.read_text("utf-8")
    assert text.count("_DIRECTORIES = (\n") == 1
    registry.write_text(text.replace("_DIRECTORIES = (\n", f'_DIRECTORIES = (\n    "{FAMILY}",\n'), "utf-8")
    package = repository / "hf_ctxmodels" / "__init__.py"
    lines = re.findall(
        rf"`(from hf_ctxmodels\.models\.{FAMILY} import \*|__all__ \+= models\.{FAMILY}\.__all__)`", page
    )
    assert len(lines) == 2
    anchor = "from hf_ctxmodels.registry import "
    text = package.read_text("utf-8").replace(anchor, "\n".join([lines[0], anchor]))
    package.write_text(text.replace("\nregister()", f"{lines[1]}\n\nregister()"), "utf-8")
    return files


@pytest.mark.slow
def test_family_from_guide_passes_common_tests(tmp_path: Path) -> None:
    repository = copy_repository(tmp_path)
    assert len(follow_contributing(repository)) == 4
    environment = {**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"cwd": repository, "env": environment, "capture_output": True, "text": True}
    (repository / "tests" / "test_newt.py").write_text(
        COPIED_PACKAGE_TEST.format(str(repository / "hf_ctxmodels")), "utf-8"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *TEST_FILES]
    result = subprocess.run([*command, "tests/test_newt.py", "-k", SELECTED_TESTS], **options)
    assert result.returncode == 0, result.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) >= 10, result.stdout[-500:]
