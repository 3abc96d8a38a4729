"""What the console command runs: one module per command, whose docstring is its help and whose `main` does the work."""
