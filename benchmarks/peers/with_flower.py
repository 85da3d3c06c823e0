"""The job on Flower's simulation engine. Its strategies know rounds only: FedAvg over as many clients as are at work at once.

    python -m benchmarks.peers.with_flower JOB

``workers`` Ray actors with one CPU each, as Flower recommends for clients that train on a CPU.
"""

import logging
import os

import torch
from flwr.simulation import run_simulation

from benchmarks.peers.flower_apps import client_app, server_app
from benchmarks.peers.job import Job, told


def main(job: Job) -> None:
    torch.set_num_threads(1)
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    logging.getLogger("flwr").setLevel(logging.WARNING)
    cpus = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": job.workers}}
    run_simulation(server_app, client_app, num_supernodes=job.num_clients, backend_config=cpus)


if __name__ == "__main__":
    main(told())
