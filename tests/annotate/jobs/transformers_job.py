"""Hugging Face's Trainer on two gloo ranks accumulates two batches a step; torch.profiler records it, or a monitor."""

import os
import sys

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from ddp_prof import annotate


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Tanh())))

    def forward(self, x, labels=None):
        return {"loss": self.net(x).square().mean()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = sys.argv[1]
    callbacks = [annotate.trainer_callback()] if "callback" in sys.argv else []
    if is_monitored := "monitor" in sys.argv:
        callbacks = [annotate.trainer_callback(every=6, steps=2, folder=folder)]
    arguments = TrainingArguments(
        output_dir=folder, max_steps=16 if is_monitored else 8, use_cpu=True, report_to=[], save_strategy="no",
        gradient_accumulation_steps=2, per_device_train_batch_size=16, disable_tqdm=True, ddp_backend="gloo",
    )  # fmt: skip
    data = [{"x": torch.randn(256), "labels": 0} for _ in range(512)]
    trainer = Trainer(Model(), arguments, train_dataset=data, callbacks=callbacks)
    if is_monitored:
        trainer.train()
    else:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as recorded:
            trainer.train()
        recorded.export_chrome_trace(f"{folder}/job.rank{os.environ['RANK']}.json.gz")
    sys.stdout.write(f"optimizer steps {trainer.state.global_step}\n")
