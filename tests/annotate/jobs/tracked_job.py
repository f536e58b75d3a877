"""A job in one process whose monitor logs to TensorBoard, W&B or MLflow: TRACKER FOLDER [unreachable]."""

import logging
import sys
from pathlib import Path

import torch
from torch import nn

from ddp_prof.annotate import Monitor

if __name__ == "__main__":
    tracker, folder, unreachable = sys.argv[1], Path(sys.argv[2]), "unreachable" in sys.argv
    logging.basicConfig(format="%(name)s %(message)s")
    if tracker == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        log = SummaryWriter(str(folder))
    elif tracker == "wandb":
        import wandb

        log = wandb.init(project="job", dir=str(folder), mode="offline")
        if unreachable:
            log.finish()
    else:
        import mlflow

        log = mlflow
        mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
        mlflow.start_run()
        if unreachable:
            mlflow.set_tracking_uri("http://127.0.0.1:9")  # no one listens to this port
    monitor = Monitor(6, 2, folder=folder / "monitor", log=[log])
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(21):
        model(torch.ones(8, 64)).square().mean().backward()
        optimizer.step()
        monitor.step()
        if tracker == "wandb" and not unreachable:
            log.log({"loss": step})
    monitor.close()
    sys.stdout.write("trained\n")
