"""Learning several tasks together (`hf-ctxmodels finetune --tasks`): batches, evaluation, the run."""
