"""ULMFiT (Howard & Ruder 2018): a regularised LSTM language model, fine-tuned on a task's text and then on the task."""
