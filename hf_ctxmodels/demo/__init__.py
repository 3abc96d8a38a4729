"""The parts of `hf-ctxmodels demo`: each shows one thing that works, beside its baseline."""
