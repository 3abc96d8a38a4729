"""Mutation score of the test suite, per subpackage.

    python tests/mutation/score.py [--packages layers heads] [--mutants 20] [--seed 0] [--jobs 2] [--output scores.md]

A mutant is the package with one operator, comparison, constant or decorator replaced by `cosmic_ray`. From every
subpackage a fixed number of mutants is sampled; a mutant is killed if a test of that subpackage (`PACKAGE_TESTS`) fails
on it. The score is the share of killed mutants. Survivors are printed with their diff: each is a missing test or an
equivalent mutant.

torch and transformers are imported once and every mutant runs in a forked process, so that a mutant costs only its
tests.
"""

import argparse
import ast
import difflib
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import parso
from cosmic_ray.ast import ast_nodes
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from isolated_tests import ROOT, run_in_fork, scratch_copy

PACKAGE = ROOT / "hf_ctxmodels"
TIME_LIMIT = 600  # seconds; a mutant that runs longer does not terminate and counts as killed

# Subpackage -> the tests that must kill its mutants, the closest first.
PACKAGE_TESTS: dict[str, tuple[str, ...]] = {
    "core": ("tests/core", "tests/models/test_registration.py", "tests/models/test_common_errors.py", "tests/hub"),
    "layers": ("tests/layers", "tests/models"),
    "tokenizers": ("tests/tokenizers",),
    "heads": ("tests/models/test_heads.py", "tests/layers", "tests/models"),
    "architectures": ("tests/models",),
    "models": ("tests/models", "tests/parity"),
    "data": ("tests/data",),
    "objectives": ("tests/objectives",),
    "training": ("tests/training", "tests/downstream"),
    "downstream": ("tests/downstream", "tests/cli"),
    "compression": ("tests/compression", "tests/ecosystem"),
    "evaluation": ("tests/evaluation", "tests/cli"),
    "inference": ("tests/inference", "tests/models", "tests/cli"),
    "conversion": ("tests/conversion", "tests/parity"),
    "hub": ("tests/hub",),
    "cli": ("tests/cli",),
}

_COMPARISONS = ("Eq", "NotEq", "Lt", "LtE", "Gt", "GtE")
_OPPOSITE_ARITHMETIC = ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_FloorDiv")
_OPERATORS = (
    *(f"core/ReplaceBinaryOperator_{pair}" for pair in _OPPOSITE_ARITHMETIC),
    *(f"core/ReplaceComparisonOperator_{a}_{b}" for a in _COMPARISONS for b in _COMPARISONS if a != b),
    "core/ReplaceComparisonOperator_Is_IsNot",
    "core/ReplaceComparisonOperator_IsNot_Is",
    "core/ReplaceTrueWithFalse",
    "core/ReplaceFalseWithTrue",
    "core/ReplaceAndWithOr",
    "core/ReplaceOrWithAnd",
    "core/AddNot",
    "core/NumberReplacer",
    "core/RemoveDecorator",
    "core/ZeroIterationForLoop",
)


@dataclass(frozen=True)
class Mutant:
    """One mutation of one file.

    Attributes:
        path: File, relative to the root of the repository.
        operator: Name of the mutation operator.
        occurrence: Index of the mutation among the mutations by this operator in the file.
    """

    path: Path
    operator: str
    occurrence: int

    def mutated_source(self) -> str | None:
        """Source of the mutated file; None if the mutation does not apply."""
        return mutate_code(
            (ROOT / self.path).read_text(encoding="utf-8"), get_operator(self.operator)(), self.occurrence
        )

    def diff(self) -> str:
        """Unified diff of the mutation, without context."""
        before = (ROOT / self.path).read_text(encoding="utf-8").splitlines()
        after = (self.mutated_source() or "").splitlines()
        lines = [*difflib.unified_diff(before, after, str(self.path), self.operator, n=0, lineterm="")]
        return "\n".join(f"    {line}" for line in lines)


def mutants_of_file(path: Path) -> Iterator[Mutant]:
    """All mutants of a file whose behavior can differ: not of annotations, `__all__` and error messages."""
    source = path.read_text(encoding="utf-8")
    nodes = [*ast_nodes(parso.parse(source))]
    inert_lines = _inert_lines(source)
    for name in _OPERATORS:
        operator = get_operator(name)()
        positions = [position for node in nodes for position in operator.mutation_positions(node)]
        for occurrence, ((line, _), _) in enumerate(positions):
            if line not in inert_lines:
                yield Mutant(path.relative_to(ROOT), name, occurrence)


def _inert_lines(source: str) -> set[int]:
    """Lines of imports, annotations, `raise` statements and `__all__`, whose mutants are equivalent or text."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        inert: list[ast.AST | None] = []
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Raise):
            inert = [node]
        elif isinstance(node, ast.AnnAssign):
            inert = [node.annotation]
        elif isinstance(node, ast.FunctionDef):
            inert = [argument.annotation for argument in ast.walk(node.args) if isinstance(argument, ast.arg)]
            inert.append(node.returns)
        for child in inert:
            if child is not None and hasattr(child, "lineno"):
                lines |= set(range(child.lineno, (child.end_lineno or child.lineno) + 1))
    return lines


def sample_mutants(package: str, count: int, seed: int) -> list[Mutant]:
    """`count` mutants of a package, sampled without replacement; the same for the same seed and sources."""
    mutants = [mutant for path in sorted((PACKAGE / package).rglob("*.py")) for mutant in mutants_of_file(path)]
    random.Random(f"{seed} {package}").shuffle(mutants)
    applicable = (mutant for mutant in mutants if mutant.mutated_source() is not None)
    return [mutant for mutant, _ in zip(applicable, range(count))]


def closest_tests(mutant: Mutant, tests: Sequence[str], tree: Path) -> list[str]:
    """The existing tests of a package, those named after the mutated module first."""
    named = sorted(str(path.relative_to(tree)) for path in tree.glob(f"tests/**/test_*{mutant.path.stem}*.py"))
    return [*named, *(path for path in tests if (tree / path).exists())]


def kill(mutant: Mutant, tests: Sequence[str], tree: Path) -> str | None:
    """Node id of the first test that fails on the mutant, "time limit", or None for a survivor.

    Args:
        mutant: The mutant to run.
        tests: The tests of its package.
        tree: A scratch copy of the repository, in which the file is mutated and restored.
    """
    file = tree / mutant.path
    source = file.read_text(encoding="utf-8")
    try:
        file.write_text(mutant.mutated_source() or source, encoding="utf-8")
        result = run_in_fork(tree, closest_tests(mutant, tests, tree), time_limit=TIME_LIMIT)
    finally:
        file.write_text(source, encoding="utf-8")
    return "time limit" if result is None else result.failed_test


def table(scores: dict[str, tuple[int, int]]) -> str:
    """Markdown table of the score of every package."""
    rows = [
        f"| {package} | {killed} of {count} | {killed / count:.0%} |" for package, (killed, count) in scores.items()
    ]
    return "\n".join(["| package | mutants killed | score |", "|---|---|---|", *rows])


def main() -> int:
    """Run the sampled mutants of the chosen packages and print their scores; 1 if a score is below `--minimum`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--packages", nargs="+", default=[*PACKAGE_TESTS], choices=[*PACKAGE_TESTS], help="packages to mutate"
    )
    parser.add_argument("--mutants", type=int, default=20, help="mutants per package")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--jobs", type=int, default=2, help="mutants that run at the same time")
    parser.add_argument("--minimum", type=float, default=0.8, help="lowest score that passes")
    parser.add_argument("--output", type=Path, help="file for the table")
    arguments = parser.parse_args()
    scores: dict[str, tuple[int, int]] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for job in range(arguments.jobs):
            trees.put(scratch_copy(Path(folder) / str(job) / "tree"))

        def timed_kill(mutant: Mutant, tests: Sequence[str]) -> tuple[Mutant, str | None, float]:
            tree, start = trees.get(), time.perf_counter()
            try:
                return mutant, kill(mutant, tests, tree), time.perf_counter() - start
            finally:
                trees.put(tree)

        for package in arguments.packages:
            mutants = sample_mutants(package, arguments.mutants, arguments.seed)
            killed = 0
            for mutant, test, seconds in pool.map(timed_kill, mutants, [PACKAGE_TESTS[package]] * len(mutants)):
                killed += test is not None
                print(f"{'killed' if test else 'SURVIVED'} {seconds:4.0f} s  {mutant.path}: {test}", flush=True)
                if test is None:
                    print(mutant.diff(), flush=True)
            scores[package] = (killed, len(mutants))
            print(f"{package}: {killed} of {len(mutants)} mutants killed", flush=True)
    print(table(scores))
    if arguments.output:
        arguments.output.write_text(table(scores) + "\n", encoding="utf-8")
    return int(any(killed < arguments.minimum * count for killed, count in scores.values()))


if __name__ == "__main__":
    sys.exit(main())
