"""A Hugging Face Trainer with the mean over all tokens of an update, an audit, and a schedule in updates.

    torchrun --nproc-per-node 2 examples/hf_trainer_exact_mean.py

The model's loss is a mean over the labelled tokens of a micro-batch, whose number differs from one to the next. The
Trainer takes the mean of such means; the callback weighs them. (Models that take num_items_in_batch, the causal LMs
of transformers among them, are weighed by the Trainer itself: there use the callback for its audit alone.)
"""

import tempfile

import torch
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertModel, Trainer, TrainingArguments

from samestep import schedules
from samestep.accelerate import SamestepTrainerCallback
from samestep.scheduler import LRScheduler

STEPS, CLASSES = 12, 3


class Tagger(torch.nn.Module):
    """A tiny encoder, made from a config, that names a class for every token."""

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=12,
            attn_implementation="eager",
        )
        self.encoder = BertModel(config, add_pooling_layer=False)
        self.head = torch.nn.Linear(16, CLASSES)

    def forward(self, input_ids, labels):
        logits = self.head(self.encoder(input_ids).last_hidden_state)
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        tokens = torch.randint(50, (12,), generator=torch.Generator().manual_seed(index))
        labels = torch.where(torch.arange(12) <= index % 12, tokens % CLASSES, -100)  # -100: not labelled
        return {"input_ids": tokens, "labels": labels}


def main() -> None:
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = LRScheduler(optimizer, schedules.linear_warmup(3) * schedules.cosine(STEPS))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=STEPS,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            ddp_find_unused_parameters=False,
        )
        trainer = Trainer(model, arguments, train_dataset=Sentences(), optimizers=(optimizer, schedule))
        callback = SamestepTrainerCallback(
            trainer, audit=4, exact_mean=lambda batch: (batch["labels"] != -100).sum()
        )
        trainer.add_callback(callback)
        trainer.train()
    if trainer.is_world_process_zero():
        print(f"updates {schedule.applied_steps}, rate {optimizer.param_groups[0]['lr']:.4f}")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
