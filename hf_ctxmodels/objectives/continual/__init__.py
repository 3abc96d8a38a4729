"""The tasks of ERNIE 2.0's continual multi-task learning, one class each, and the objective that schedules them."""
