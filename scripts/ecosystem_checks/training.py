"""Checks of training and fine-tuning tools."""

import torch

from .context import TEXTS, CheckContext, assert_close, check


@check("transformers Trainer", "transformers")
def trainer(context: CheckContext) -> str:
    """Training, evaluation and resuming with a classifier."""
    from transformers import Trainer, TrainingArguments

    examples = [{**context.tokenizer(text), "labels": number % 2} for number, text in enumerate(TEXTS * 4)]
    output = str(context.folder / "trainer")
    options = {"output_dir": output, "max_steps": 4, "save_steps": 2, "report_to": "none", "use_cpu": True}
    arguments = TrainingArguments(**options, per_device_train_batch_size=4, disable_tqdm=True)
    trainer = Trainer(
        context.classifier(),
        arguments,
        train_dataset=examples,
        eval_dataset=examples,
        processing_class=context.tokenizer,
    )
    trainer.train()
    assert "eval_loss" in trainer.evaluate()
    assert trainer.train(resume_from_checkpoint=True).global_step == 4
    return "`CtxTrainer` is exact under gradient accumulation for losses with several terms"


@check("Accelerate, DDP", "accelerate")
def ddp(context: CheckContext) -> str:
    """`hf-ctxmodels pretrain` in two processes on a CPU (gloo); the saved model loads."""
    context.pretrain("ddp_cpu.yaml")
    return ""


@check("Accelerate, FSDP2", "accelerate")
def fsdp2(context: CheckContext) -> str:
    """`hf-ctxmodels pretrain`, sharded over two processes on a CPU (gloo); the saved model loads."""
    context.pretrain("fsdp2.yaml", "--num_processes", "2", "--mixed_precision", "no")
    return ""


@check("PEFT", "peft")
def peft(context: CheckContext) -> str:
    """LoRA without `target_modules`: trained, saved, reopened and merged, with equal logits."""
    from peft import LoraConfig, PeftModel, get_peft_model

    model = get_peft_model(context.classifier(), LoraConfig(task_type="SEQ_CLS"))
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(**context.batch(), labels=torch.tensor([0, 1, 0, 1])).loss.backward()
        optimizer.step()
    model.eval()
    expected = model(**context.batch()).logits
    model.save_pretrained(str(context.folder / "adapter"))
    reloaded = PeftModel.from_pretrained(context.classifier(), context.folder / "adapter").eval()
    assert_close(reloaded(**context.batch()).logits, expected)
    assert_close(reloaded.merge_and_unload()(**context.batch()).logits, expected)
    return ""
