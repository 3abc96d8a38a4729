"""Checks of training and fine-tuning tools."""

from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from .context import TEXTS, CheckContext, assert_close, check
from .evaluation import save_decoder


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


@check("PyTorch Lightning", "lightning")
def lightning(context: CheckContext) -> str:
    """A classifier trained in bfloat16 with gradient accumulation and clipping; its checkpoint resumes training and
    equals the model saved by `save_pretrained`."""
    from lightning.pytorch import LightningModule, Trainer

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = context.classifier().train()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    examples: Any = [{**context.batch(), "labels": torch.tensor([0, 1, 0, 1])}] * 4
    batches: Any = torch.utils.data.DataLoader(examples, batch_size=None)
    checkpoint, directory = context.folder / "lightning.ckpt", context.folder / "lightning"
    options: dict[str, Any] = {"accelerator": "cpu", "precision": "bf16-mixed", "logger": False}
    options |= {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "default_root_dir": context.folder}
    options |= {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = Trainer(max_steps=2, **options)
    trained = Classifier()
    trainer.fit(trained, batches)
    trainer.save_checkpoint(checkpoint)
    trained.model.save_pretrained(directory)
    loaded = Classifier.load_from_checkpoint(checkpoint).eval()
    saved = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    with torch.no_grad():
        assert_close(loaded.model(**context.batch()).logits, saved(**context.batch()).logits)
    resumed = Trainer(max_steps=4, **options)
    resumed.fit(Classifier(), batches, ckpt_path=checkpoint)
    assert resumed.global_step == 4
    return ""


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


@check("TRL", "trl")
def trl(context: CheckContext) -> str:
    """`SFTTrainer` with packing: the loss is the mean over the targets of the separate texts. `DPOTrainer` trains with
    the saved model as the reference model."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    directory = save_decoder(context, "gpt2")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    options = {"max_steps": 2, "report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True}
    packing = SFTConfig(str(context.folder / "sft"), packing=True, max_length=128, **options)
    texts = Dataset.from_dict({"text": TEXTS})
    trainer = SFTTrainer(model, packing, train_dataset=texts, eval_dataset=texts, processing_class=tokenizer)
    loss = trainer.evaluate()["eval_loss"]
    total, num_targets = 0.0, 0
    for text in TEXTS:
        ids = tokenizer(text + tokenizer.eos_token, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
        num_targets += ids.shape[1] - 1
    assert_close(torch.tensor(loss), torch.tensor(total / num_targets))
    trainer.train()
    pairs = Dataset.from_dict({"prompt": TEXTS, "chosen": TEXTS, "rejected": TEXTS[::-1]})
    DPOTrainer(directory, args=DPOConfig(str(context.folder / "dpo"), **options), train_dataset=pairs).train()
    return "`RewardTrainer` needs an end token; for BERT, set `tokenizer.eos_token = tokenizer.sep_token`"


@check("SetFit", "setfit")
def setfit(context: CheckContext) -> str:
    """A saved encoder, trained on four texts, saved and reopened, with equal probabilities."""
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments

    model = SetFitModel.from_pretrained(context.save(AutoModel), device="cpu")
    examples = Dataset.from_dict({"text": TEXTS * 2, "label": [0, 1, 0, 1] * 2})
    output = str(context.folder / "setfit")
    arguments = TrainingArguments(output_dir=output, max_steps=2, batch_size=4, report_to="none")
    Trainer(model=model, args=arguments, train_dataset=examples).train()
    model.save_pretrained(output)
    reloaded = SetFitModel.from_pretrained(output, device="cpu")
    assert_close(reloaded.predict_proba(TEXTS), model.predict_proba(TEXTS))
    return ""
