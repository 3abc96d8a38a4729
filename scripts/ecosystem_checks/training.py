"""Tools that train and adapt."""

import torch

from .workplace import TEXTS, Workplace, assert_close, check


@check("transformers Trainer", "transformers")
def trainer(place: Workplace) -> str:
    """Training, evaluation and resuming of a classifier."""
    from transformers import Trainer, TrainingArguments

    rows = [{**place.tokenizer(text), "labels": number % 2} for number, text in enumerate(TEXTS * 4)]
    output = str(place.folder / "trainer")
    options = {"output_dir": output, "max_steps": 4, "save_steps": 2, "report_to": "none", "use_cpu": True}
    arguments = TrainingArguments(**options, per_device_train_batch_size=4, disable_tqdm=True)
    made = Trainer(
        place.classifier(), arguments, train_dataset=rows, eval_dataset=rows, processing_class=place.tokenizer
    )
    made.train()
    assert "eval_loss" in made.evaluate()
    assert made.train(resume_from_checkpoint=True).global_step == 4
    return "heads with several terms are exact under gradient accumulation by `CtxTrainer`"


@check("Accelerate, DDP", "accelerate")
def ddp(place: Workplace) -> str:
    """`hf-ctxmodels pretrain` in two processes on a CPU (gloo); the saved model opens."""
    place.pretrain("ddp_cpu.yaml")
    return ""


@check("Accelerate, FSDP2", "accelerate")
def fsdp2(place: Workplace) -> str:
    """`hf-ctxmodels pretrain`, sharded over two processes on a CPU (gloo); the saved model opens."""
    place.pretrain("fsdp2.yaml", "--num_processes", "2", "--mixed_precision", "no")
    return ""


@check("PEFT", "peft")
def peft(place: Workplace) -> str:
    """LoRA without `target_modules`: trained, saved, reopened and merged, with equal logits."""
    from peft import LoraConfig, PeftModel, get_peft_model

    model = get_peft_model(place.classifier(), LoraConfig(task_type="SEQ_CLS"))
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(**place.batch(), labels=torch.tensor([0, 1, 0, 1])).loss.backward()
        optimizer.step()
    model.eval()
    expected = model(**place.batch()).logits
    model.save_pretrained(str(place.folder / "adapter"))
    again = PeftModel.from_pretrained(place.classifier(), place.folder / "adapter").eval()
    assert_close(again(**place.batch()).logits, expected)
    assert_close(again.merge_and_unload()(**place.batch()).logits, expected)
    return ""
