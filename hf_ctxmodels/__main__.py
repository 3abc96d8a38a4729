"""`python -m hf_ctxmodels <command> ...`, for which `hf-ctxmodels <command> ...` is short."""

from hf_ctxmodels_cli import main

if __name__ == "__main__":
    main()
