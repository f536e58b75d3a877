"""Lightning on two gloo ranks accumulates two batches a step; torch.profiler records it, or a monitor."""

import sys

import lightning.pytorch as pl
import torch
from torch import nn

from ddp_prof import annotate


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Tanh())))

    def training_step(self, batch, _index):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = sys.argv[1]
    callbacks = [annotate.lightning_callback()] if "callback" in sys.argv else []
    if is_monitored := "monitor" in sys.argv:
        callbacks = [annotate.lightning_callback(every=6, steps=2, folder=folder)]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=4 if is_monitored else 2,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    data = torch.utils.data.DataLoader(torch.randn(512, 256), batch_size=32)
    if is_monitored:
        trainer.fit(Module(), data)
    else:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as recorded:
            trainer.fit(Module(), data)
        recorded.export_chrome_trace(f"{folder}/job.rank{trainer.global_rank}.json.gz")
    sys.stdout.write(f"optimizer steps {trainer.global_step}\n")
