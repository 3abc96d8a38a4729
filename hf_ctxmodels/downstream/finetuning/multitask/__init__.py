"""Fine-tuning of one encoder on several tasks at once (MT-DNN)."""
