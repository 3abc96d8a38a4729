"""`hf-ctxmodels export` from a clone: the same command line."""

from hf_ctxmodels.cli.export import main
from hf_ctxmodels.core.errors import run_script

if __name__ == "__main__":
    run_script(main)
