"""`hf-ctxmodels train-tokenizer` from a clone: the same command line."""

from hf_ctxmodels.cli.train_tokenizer import main
from hf_ctxmodels.core.errors import run_script

if __name__ == "__main__":
    run_script(main)
