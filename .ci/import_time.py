"""What `import hf_ctxmodels` adds to a process that has imported transformers and its BERT.

    python .ci/import_time.py [--runs 5] [TREE ...]

Prints the median of several processes; those of several source trees are interleaved. It measures, and judges nothing.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

MEASURED = """
import time
import transformers
from transformers import AutoModel, AutoTokenizer, BertModel, BertTokenizer
start = time.perf_counter(), time.process_time()
import hf_ctxmodels
print(time.perf_counter() - start[0], time.process_time() - start[1])
"""


def added(tree: Path, bytecode: str) -> tuple[float, float]:
    """Seconds by the wall and of CPU time, in a process of its own, whose bytecode is kept in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONPYCACHEPREFIX": bytecode}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    result = subprocess.run(
        [sys.executable, "-c", MEASURED], cwd=tree, env=environment, capture_output=True, text=True, check=True
    )
    wall, cpu = result.stdout.split()
    return float(wall), float(cpu)


def main() -> None:
    """Measure, and print a line for each tree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("trees", nargs="*", type=Path, default=[Path(__file__).parents[1]], metavar="TREE")
    arguments = parser.parse_args()
    with TemporaryDirectory() as bytecode:
        for tree in arguments.trees:
            added(tree, bytecode)  # writes it, as an installation does
        times = [[added(tree, bytecode) for tree in arguments.trees] for _ in range(arguments.runs)]
    for number, tree in enumerate(arguments.trees):
        walls, cpus = zip(*(run[number] for run in times))
        print(
            f"import hf_ctxmodels in {tree}: {median(walls):.3f} s by the wall ({min(walls):.3f} to {max(walls):.3f}), "
            f"{median(cpus):.3f} s of CPU time; median of {arguments.runs}"
        )


if __name__ == "__main__":
    main()
