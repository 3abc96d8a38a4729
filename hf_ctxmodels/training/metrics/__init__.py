"""Reports of a run: step metrics, progress, evaluation, baselines, summary."""
