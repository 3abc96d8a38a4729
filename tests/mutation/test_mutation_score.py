"""The list of tests per subpackage, and the limits of the runs on mutants."""

from pathlib import Path

from isolated_tests import ROOT, run_in_fork
from package_tests import PACKAGE_TESTS

PASSING_TESTS = "import time\n" + "".join(f"def test_{index}():\n    time.sleep(0.5)\n" for index in range(8))
ENDLESS_TEST = "def test_endless():\n    while True:\n        pass\n"
SLOW_END = """
import time
def pytest_sessionfinish():
    time.sleep(1.2)
"""


def test_every_subpackage_has_tests() -> None:
    subpackages = {file.parent.name for file in (ROOT / "hf_ctxmodels").glob("*/__init__.py")}
    assert set(PACKAGE_TESTS) == subpackages
    for tests in PACKAGE_TESTS.values():
        assert all((ROOT / path).exists() for path in tests), tests


def test_test_that_does_not_end_fails(tmp_path: Path) -> None:
    (tmp_path / "test_mutant.py").write_text(ENDLESS_TEST, "utf-8")
    result = run_in_fork(tmp_path, ["test_mutant.py"], test_limit=1)
    assert result.failed_test == "test_mutant.py::test_endless"
    assert "more than 1 s" in result.output


def test_long_run_of_passing_tests_is_undecided(tmp_path: Path) -> None:
    (tmp_path / "test_mutant.py").write_text(PASSING_TESTS, "utf-8")
    assert run_in_fork(tmp_path, ["test_mutant.py"], time_limit=2, test_limit=1) is None
    (tmp_path / "conftest.py").write_text(SLOW_END, "utf-8")
    assert run_in_fork(tmp_path, ["test_mutant.py"], keyword="test_0", test_limit=1).failed_test is None
