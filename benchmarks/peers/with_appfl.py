"""The job on APPFL's virtual-time simulator: its AsyncSimDriver with its FedBuff.

    python -m benchmarks.peers.with_appfl JOB

Its ``optimize_memory`` collects garbage several times an update; it is switched off, which makes APPFL many times as fast, unless
``options`` has "default". Clients differ in speed, so that they are asynchronous; their time is given, not measured.
"""

import logging
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from benchmarks.peers.absent import stand_in_for
from benchmarks.peers.job import Job, examples, settle, told
from benchmarks.peers.tally import say

JOB = told()
if "wandb" in stand_in_for("wandb", "piq", "seaborn", "pandas", "zstd", "blosc"):
    import wandb

    wandb.run = None  # APPFL asks whether there is one

from appfl.agent import SimClientAgent, SimServerAgent  # noqa: E402
from appfl.vsim import AsyncSimDriver, ClientProfile  # noqa: E402

MODEL = Path(__file__).with_name("appfl_model.py")


def config_of(job: Job, folder: str) -> dict[str, Any]:
    lean = {} if "default" in job.options else {"optimize_memory": False}
    return {
        "client_configs": {
            "model_configs": {
                "model_path": str(MODEL),
                "model_name": "network",
                "model_kwargs": {"name": job.network},
            },
            "train_configs": {
                "trainer": "VanillaTrainer",
                "mode": "step",
                "num_local_steps": job.num_local_steps,
                "train_batch_size": job.batch_size,
                "train_data_shuffle": False,
                "optim": "SGD",
                "optim_args": {"lr": job.client_lr},
                "loss_fn": "CrossEntropyLoss",
                "metric_path": str(MODEL),
                "metric_name": "accuracy",
                "do_validation": False,
                "device": job.device,
                "logging_output_dirname": folder,
                "logging_output_filename": "client",
                **lean,
            },
            **lean,
        },
        "server_configs": {
            "num_clients": job.num_clients,
            "num_global_epochs": job.num_updates,
            "scheduler": "AsyncScheduler",
            "scheduler_kwargs": dict(lean),
            "aggregator": "FedBuffAggregator",
            "aggregator_kwargs": {
                "K": job.buffer_size,
                "alpha": 1.0,
                "staleness_fn": "constant",
                "staleness_fn_kwargs": {},
                "client_weights_mode": "equal",
                **lean,
            },
            "device": "cpu",
            "logging_output_dirname": folder,
            "logging_output_filename": "server",
            **lean,
        },
    }


def main(job: Job) -> None:
    settle(job)
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(job, folder)
        clients = [
            SimClientAgent(config["client_configs"], client_id=f"client{number}", client_dataset=data)
            for number, data in enumerate(TensorDataset(*examples(job, client)) for client in range(job.num_clients))
        ]
        server = SimServerAgent(config)
        # Its server asks for deterministic convolutions, which nobody else makes.
        torch.backends.cudnn.deterministic = False
        settle(job)
        logging.disable(logging.INFO)  # a line for every client's every job
        profiles = {client.get_id(): ClientProfile(compute_factor=1 + number) for number, client in enumerate(clients)}
        driver = AsyncSimDriver(
            server, clients, profiles, max_in_flight=job.concurrency, logger=server.logger, base_step_time=0.01
        )
        driver.run()
    if job.device != "cpu":
        torch.cuda.synchronize()
    say("appfl", "appfl", updates=len(driver.history))


if __name__ == "__main__":
    main(JOB)
