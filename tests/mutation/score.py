"""Mutation score of the test suite, per subpackage.

    python tests/mutation/score.py [--packages layers heads] [--mutants 20] [--seed 0] [--jobs 2] [--output scores.md]

A mutant is the package with one operator, comparison, constant or decorator replaced by `cosmic_ray`. From every
subpackage a fixed number of mutants is sampled; a mutant is killed if a test of that subpackage (`PACKAGE_TESTS`) fails
on it, or takes more than `TEST_LIMIT` seconds. A mutant whose tests pass until `--time_limit` is undecided. The score
is the share of killed mutants. The other mutants are printed with their diff: each is a missing test or an equivalent
mutant.

The dependencies are imported once and every mutant runs in a forked process, so that a mutant costs only its
tests.
"""

import argparse
import ast
import difflib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import parso
from cosmic_ray.ast import ast_nodes
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from isolated_tests import ROOT, TestRun, run_in_fork, scratch_copy
from package_tests import PACKAGE_TESTS

PACKAGE = ROOT / "hf_ctxmodels"

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
# `strict` asserts that the arguments of zip have equal lengths; the other keywords set the style of figures.
_INERT_KEYWORDS = {"strict", "dpi", "figsize", "fontsize", "linewidth", "markersize", "s"}

Position = tuple[int, int]  # line and column


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
        """Source of the mutated file; None if the mutation does not apply, is no valid Python, or replaces the `*`
        before keyword-only parameters, which is no multiplication."""
        original = (ROOT / self.path).read_text(encoding="utf-8")
        source = mutate_code(original, get_operator(self.operator)(), self.occurrence)
        if source is None or source.count(" /,\n") > original.count(" /,\n"):
            return None
        try:
            ast.parse(source)
        except SyntaxError:
            return None
        return source

    def diff(self) -> str:
        """Unified diff of the mutation, without context."""
        before = (ROOT / self.path).read_text(encoding="utf-8").splitlines()
        after = (self.mutated_source() or "").splitlines()
        lines = [*difflib.unified_diff(before, after, str(self.path), self.operator, n=0, lineterm="")]
        return "\n".join(f"    {line}" for line in lines)


def mutants_of_file(path: Path) -> Iterator[Mutant]:
    """All mutants of a file whose behavior can differ."""
    source = path.read_text(encoding="utf-8")
    nodes = [*ast_nodes(parso.parse(source))]
    inert_ranges = _inert_ranges(source)
    for name in _OPERATORS:
        operator = get_operator(name)()
        positions = [position for node in nodes for position in operator.mutation_positions(node)]
        for occurrence, (position, _) in enumerate(positions):
            if not any(start <= position < stop for start, stop in inert_ranges):
                yield Mutant(path.relative_to(ROOT), name, occurrence)


def _inert_ranges(source: str) -> list[tuple[Position, Position]]:
    """Ranges whose mutants are equivalent or change only text or style: the lines of imports, annotations and `raise`
    statements, and the arguments `_INERT_KEYWORDS`."""
    ranges: list[tuple[Position, Position]] = []
    for node in ast.walk(ast.parse(source)):
        inert: list[ast.expr | ast.stmt | None] = []
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Raise):
            inert = [node]
        elif isinstance(node, ast.AnnAssign):
            inert = [node.annotation]
        elif isinstance(node, ast.FunctionDef):
            inert = [argument.annotation for argument in ast.walk(node.args) if isinstance(argument, ast.arg)]
            inert.append(node.returns)
        elif isinstance(node, ast.keyword) and node.arg in _INERT_KEYWORDS:
            ranges.append(((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)))
        ranges += [((child.lineno, 0), ((child.end_lineno or child.lineno) + 1, 0)) for child in inert if child]
    return ranges


def sample_mutants(package: str, count: int, seed: int) -> list[Mutant]:
    """`count` mutants of a package, sampled without replacement; the same for the same seed and sources."""
    mutants = [mutant for path in sorted((PACKAGE / package).rglob("*.py")) for mutant in mutants_of_file(path)]
    random.Random(f"{seed} {package}").shuffle(mutants)
    applicable = (mutant for mutant in mutants if mutant.mutated_source() is not None)
    return [mutant for mutant, _ in zip(applicable, range(count))]


def closest_tests(mutant: Mutant, tree: Path) -> list[str]:
    """Files of tests that are named after the mutated module, and files that name it, for example in an import, or run
    its command, such as `analyze attention`."""
    names = [".".join(mutant.path.with_suffix("").parts)]
    if mutant.path.parent.name == "cli" and "_" in mutant.path.stem:
        names += [f'"{mutant.path.stem}"'.replace("_", separator) for separator in (" ", '", "')]
    files = sorted(file for file in tree.glob("tests/**/test_*.py") if "transformers_suite" not in file.parts)
    named = [file for file in files if mutant.path.stem.removesuffix("s") in file.stem]
    importing = [file for file in files if any(name in file.read_text(encoding="utf-8") for name in names)]
    return [*dict.fromkeys(str(file.relative_to(tree)) for file in [*named, *importing])]


def run_mutant(mutant: Mutant, package_tests: Sequence[str], tree: Path, time_limit: float) -> TestRun | None:
    """Run the closest tests, then the tests of the package, until one fails; None after `time_limit` seconds.

    Args:
        mutant: The mutant to run.
        package_tests: The tests of its package.
        tree: A scratch copy of the repository, in which the file is mutated and restored.
        time_limit: Seconds for all tests together.
    """
    file = tree / mutant.path
    source = file.read_text(encoding="utf-8")
    start = time.perf_counter()
    result: TestRun | None = None
    try:
        file.write_text(mutant.mutated_source() or source, encoding="utf-8")
        for tests in filter(None, [closest_tests(mutant, tree), package_tests]):
            result = run_in_fork(tree, tests, time_limit=max(0, start + time_limit - time.perf_counter()))
            if result is None or result.failed_test:
                break
    finally:
        file.write_text(source, encoding="utf-8")
    return result


def check_unmodified(tests: Sequence[str], tree: Path) -> None:
    """Run the tests that killed mutants on the unmodified package.

    Raises:
        RuntimeError: A test fails there, too, so that mutants counted as killed may be survivors.
    """
    result = run_in_fork(tree, tests) if tests else None
    if result and result.failed_test:
        raise RuntimeError(
            f"{result.failed_test} fails without a mutation, and a mutant counts as killed if a test fails only on "
            f"the mutant. Fix: make the test pass in a copy of the repository.\n{result.output}"
        )


def table(outcomes: dict[str, Counter[str]]) -> str:
    """Markdown table of the score of every package."""
    rows = [
        f"| {package} | {counts.total()} | {counts['killed']} | {counts['SURVIVED']} | {counts['undecided']} "
        f"| {score(counts):.0%} |"
        for package, counts in outcomes.items()
    ]
    return "\n".join(
        ["| package | mutants | killed | survived | undecided | score |", "|---|---|---|---|---|---|", *rows]
    )


def score(counts: Counter[str]) -> float:
    """Share of killed mutants; undecided mutants count as not killed."""
    return counts["killed"] / counts.total()


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
    parser.add_argument("--time_limit", type=float, default=600, help="seconds per mutant for all tests together")
    parser.add_argument("--output", type=Path, help="file for the table")
    arguments = parser.parse_args()
    outcomes: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for job in range(arguments.jobs):
            trees.put(scratch_copy(Path(folder) / str(job) / "tree"))

        def timed_run(mutant: Mutant, tests: Sequence[str]) -> tuple[Mutant, TestRun | None, float]:
            tree, start = trees.get(), time.perf_counter()
            try:
                return mutant, run_mutant(mutant, tests, tree, arguments.time_limit), time.perf_counter() - start
            finally:
                trees.put(tree)

        for package in arguments.packages:
            mutants = sample_mutants(package, arguments.mutants, arguments.seed)
            outcomes[package], killing_tests = Counter(), set()
            for mutant, result, seconds in pool.map(timed_run, mutants, [PACKAGE_TESTS[package]] * len(mutants)):
                test = result and result.failed_test
                outcome = "undecided" if result is None else "killed" if test else "SURVIVED"
                outcomes[package][outcome] += 1
                print(f"{outcome} {seconds:4.0f} s  {mutant.path}: {test}", flush=True)
                if test:
                    killing_tests.add(test)
                else:
                    print(mutant.diff(), flush=True)
            tree = trees.get()
            check_unmodified(sorted(test for test in killing_tests if "::" in test), tree)
            trees.put(tree)
            print(f"{package}: {outcomes[package]['killed']} of {len(mutants)} mutants killed", flush=True)
    print(table(outcomes))
    if arguments.output:
        arguments.output.write_text(table(outcomes) + "\n", encoding="utf-8")
    return int(any(score(counts) < arguments.minimum for counts in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
