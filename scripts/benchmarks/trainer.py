"""Masked language modelling as users of transformers do it: `Trainer` with `DataCollatorForLanguageModeling`."""

import tempfile
from typing import Any

import torch
from transformers import (
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

from hf_ctxmodels.training.arguments import LoopArguments


class _CountingCollator(DataCollatorForLanguageModeling):
    """Notes the tokens of each batch that are no padding."""

    def torch_call(self, examples: Any) -> dict[str, Any]:
        batch = super().torch_call(examples)
        self.tokens = [*getattr(self, "tokens", []), int(batch["attention_mask"].sum())]
        return batch


def train_with_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Any,
    how: LoopArguments,
    device: torch.device,
    attention: str,
) -> list[int]:
    """Train the reference class of a model; gives the tokens of each step's batch.

    Rows lie ready as lists, with their special tokens marked, so the collator need not look for them.

    Args:
        model: Ours; the reference class is opened from its export.
        tokenizer, examples: Text as rows of `input_ids`.
        how: Length, batch size and optimizer of the run.
        device: Where it runs.
        attention: Attention implementation.
    """
    with tempfile.TemporaryDirectory() as folder:
        model.export_reference(folder)  # type: ignore[operator]
        peer = AutoModelForMaskedLM.from_pretrained(folder, attn_implementation=attention)
    special = set(tokenizer.all_special_ids)
    rows = [example["input_ids"].tolist() for example in (examples[i] for i in range(len(examples)))]
    dataset = [{"input_ids": row, "special_tokens_mask": [int(token in special) for token in row]} for row in rows]
    collator = _CountingCollator(tokenizer)
    arguments = TrainingArguments(
        output_dir=how.output_dir,
        max_steps=how.max_steps or 0,
        per_device_train_batch_size=how.per_device_batch_size,
        learning_rate=how.learning_rate,
        weight_decay=how.optimizer.weight_decay,
        logging_steps=how.logging_steps,
        bf16=how.mixed_precision == "bf16",
        use_cpu=device.type == "cpu",
        seed=how.seed,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    Trainer(peer, arguments, collator, dataset).train()  # type: ignore[arg-type]
    return collator.tokens
