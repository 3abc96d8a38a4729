"""How pretrained embeddings are used: tasks, fine-tuning, multi-task learning and adapters."""
