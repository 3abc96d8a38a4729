"""Run `hf-ctxmodels compare` with its commands in forks of this process, which saves the imports."""

import os
import sys
import time
import traceback

import hf_ctxmodels_cli
from hf_ctxmodels.comparison import measures, runner
from hf_ctxmodels.comparison.processes import ProcessCost
from hf_ctxmodels.core.errors import CtxError


def run_in_fork(command, log, deadline=None):
    """Replace `run_command`; the deadline is ignored."""
    arguments = command[command.index("hf_ctxmodels") + 1 :]
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.argv, code = ["hf-ctxmodels", *arguments], 1
        try:
            hf_ctxmodels_cli.main()
        except SystemExit as exit_request:
            code = int(exit_request.code or 0)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    _, status, usage = os.wait4(pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise CtxError(log.read_text(), location=log)
    return ProcessCost(time.monotonic() - start, usage.ru_maxrss * 1024)


if __name__ == "__main__":
    runner.run_command = measures.run_command = run_in_fork
    runner._SHORT_TIMING = 0.1  # seconds; the timed steps affect no result
    sys.argv = ["hf-ctxmodels compare", *sys.argv[1:]]
    from hf_ctxmodels.cli import compare
    from hf_ctxmodels.core.console import run_script

    run_script(compare.main)
