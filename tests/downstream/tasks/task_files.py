"""Helpers that create tasks and write their files."""

import gzip

from hf_ctxmodels.downstream.tasks import TASKS, TaskArguments


def make_task(name, **arguments):
    return TASKS[name](TaskArguments(**arguments))


def write_file(path, text):
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)
