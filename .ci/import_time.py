"""Measure the time of `import hf_ctxmodels` in a process that has imported transformers and BERT.

    python .ci/import_time.py [--runs 5] [TREE ...]

Prints the median over several processes for each source tree; trees are interleaved. There is no threshold.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

SCRIPT = """
import time
import transformers
from transformers import AutoModel, AutoTokenizer, BertModel, BertTokenizer
start = time.perf_counter(), time.process_time()
import hf_ctxmodels
print(time.perf_counter() - start[0], time.process_time() - start[1])
"""


def import_time(tree: Path, bytecode: str) -> tuple[float, float]:
    """Wall-clock and CPU seconds of the import in a subprocess, with the given folder as bytecode cache."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONPYCACHEPREFIX": bytecode}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tree, env=environment, capture_output=True, text=True, check=True
    )
    wall, cpu = result.stdout.split()
    return float(wall), float(cpu)


def main() -> None:
    """Measure and print one line per tree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="Processes per source tree.")
    parser.add_argument(
        "trees", nargs="*", type=Path, default=[Path(__file__).parents[1]], metavar="TREE", help="Source trees."
    )
    arguments = parser.parse_args()
    with TemporaryDirectory() as bytecode:
        for tree in arguments.trees:
            import_time(tree, bytecode)  # compiles the bytecode, as an installation does
        times = [[import_time(tree, bytecode) for tree in arguments.trees] for _ in range(arguments.runs)]
    for number, tree in enumerate(arguments.trees):
        walls, cpus = zip(*(run[number] for run in times))
        print(
            f"import hf_ctxmodels in {tree}: {median(walls):.3f} s wall-clock ({min(walls):.3f} to {max(walls):.3f}), "
            f"{median(cpus):.3f} s CPU time; median of {arguments.runs} runs"
        )


if __name__ == "__main__":
    main()
