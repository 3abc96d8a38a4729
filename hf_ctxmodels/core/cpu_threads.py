"""CPU threads of torch on machines that it shares with other processes, and in containers."""

import os
import sys

from joblib import cpu_count


def configure_threads() -> None:
    """Set the environment variables of OpenMP that the user has not set; without effect once torch is imported.

    At the end of a parallel loop threads wait for each other. By default they spin for milliseconds, and keep the core
    that the last thread needs if other processes leave too few: a training step takes up to 20 times as long. With
    `OMP_WAIT_POLICY=PASSIVE` they sleep. `OMP_NUM_THREADS` is set in a container whose CPU quota is smaller than the
    machine: torch would start a thread per core of the machine.
    """
    if "torch" in sys.modules:
        return
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if hasattr(os, "sched_getaffinity") and cpu_count() < len(os.sched_getaffinity(0)):
        num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpu_count() // num_processes)))
