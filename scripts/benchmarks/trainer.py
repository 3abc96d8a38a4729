"""Masked and causal language modeling with transformers' `Trainer` and `DataCollatorForLanguageModeling`."""

import tempfile
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

from benchmarks.settings import Settings
from hf_ctxmodels.training.arguments import LoopArguments
from hf_ctxmodels.training.defaults import with_default_rates


class _CountingCollator(DataCollatorForLanguageModeling):
    """Records the number of tokens of each batch, without padding."""

    def torch_call(self, examples: Any) -> dict[str, Any]:
        batch = super().torch_call(examples)
        self.tokens = [*getattr(self, "tokens", []), int(batch["attention_mask"].sum())]
        return batch


def train_with_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Any,
    loop_arguments: LoopArguments,
    settings: Settings,
) -> list[int]:
    """Train the transformers class of a model, and return the number of tokens of each batch.

    Examples are converted to lists with a special token mask beforehand, so that the collator need not compute it.

    Args:
        model: Model of this package; the reference is loaded from its export.
        tokenizer: Tokenizer of the examples.
        examples: Examples with `input_ids`.
        loop_arguments: Steps, batch size and optimizer of the run.
        settings: Device and attention implementation.
    """
    is_masked = tokenizer.mask_token is not None
    with tempfile.TemporaryDirectory() as folder:
        model.export_reference(folder)  # type: ignore[operator]
        auto_class = AutoModelForMaskedLM if is_masked else AutoModelForCausalLM
        reference = auto_class.from_pretrained(folder, attn_implementation=settings.reference_attention)
    special_ids = set(tokenizer.all_special_ids)
    sequences = [examples[i]["input_ids"].tolist() for i in range(len(examples))]
    dataset = [{"input_ids": ids, "special_tokens_mask": [int(i in special_ids) for i in ids]} for ids in sequences]
    collator = _CountingCollator(tokenizer, mlm=is_masked)
    loop_arguments = with_default_rates(loop_arguments, model.config)
    assert loop_arguments.optimizer is not None
    assert loop_arguments.learning_rate is not None
    arguments = TrainingArguments(
        output_dir=loop_arguments.output_dir,
        max_steps=loop_arguments.max_steps or 0,
        per_device_train_batch_size=loop_arguments.per_device_batch_size,
        learning_rate=loop_arguments.learning_rate,
        weight_decay=loop_arguments.optimizer.weight_decay,
        logging_steps=loop_arguments.logging_steps,
        bf16=loop_arguments.dtype == "bfloat16",
        use_cpu=settings.torch_device.type == "cpu",
        seed=loop_arguments.seed,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    Trainer(reference, arguments, collator, dataset).train()  # type: ignore[arg-type]
    return collator.tokens
