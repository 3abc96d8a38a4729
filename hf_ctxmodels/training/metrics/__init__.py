"""What a run reports: step metrics, progress, evaluation, baselines, summary."""
