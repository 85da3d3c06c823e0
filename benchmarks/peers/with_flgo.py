"""The job on FLGo: its FedBuff on its virtual clock, clients in turn.

    python -m benchmarks.peers.with_flgo JOB

FLGo wants a benchmark as a package made from a file (``flgo_task.py``) and a task as a folder; both go into a temporary folder.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.peers.job import Job, settle, told
from benchmarks.peers.tally import say

JOB = told()
TASK = Path(__file__).with_name("flgo_task.py")


def options_of(job: Job) -> dict[str, object]:
    """Nothing is evaluated, nothing logged; UNI gives the clients unequal latencies, so that they are asynchronous."""
    return {
        "num_rounds": job.num_versions,
        "proportion": job.concurrency / job.num_clients,
        "sample": "uniform",
        "num_steps": job.num_local_steps,
        "batch_size": job.batch_size,
        "learning_rate": job.client_lr,
        "train_holdout": 0.0,
        "eval_interval": -1,
        "responsiveness": "UNI-1-20",
        "algo_para": [job.buffer_size / job.num_clients, 1.0],
        "gpu": [0] if job.device != "cpu" else [],
        "log_level": "ERROR",
        "no_tqdm": True,
        "no_log_console": True,
    }


def main(job: Job) -> None:
    import flgo
    import flgo.algorithm.fedbuff as fedbuff
    from flgo.benchmark.partition import BasicPartitioner

    class InTurn(BasicPartitioner):
        """Client i holds the i-th run of examples."""

        def __init__(self) -> None:
            self.num_clients = job.num_clients

        def __call__(self, data: object) -> list[list[int]]:
            size = job.num_examples
            return [list(range(client * size, (client + 1) * size)) for client in range(job.num_clients)]

    class Counting:
        """FLGo's FedBuff, whose arrivals are counted: several may come at one tick of its clock."""

        Client = fedbuff.Client
        arrivals = 0

        class Server(fedbuff.Server):
            def package_handler(self, received_packages: dict[str, list[object]]) -> bool:
                Counting.arrivals += len(received_packages["__cid"])
                updated: bool = super().package_handler(received_packages)
                return updated

    settle(job)
    benchmark = flgo.gen_benchmark_from_file("flgo_benchmark", str(TASK), data_type="general", overwrite=True)
    sys.argv = sys.argv[:1]  # FLGo reads its options from the command line too
    flgo.gen_task({"benchmark": {"name": benchmark}, "partitioner": InTurn()}, task_path="flgo_job")
    runner = flgo.init("flgo_job", Counting, option=options_of(job))
    runner.run()
    if job.device != "cpu":
        torch.cuda.synchronize()
    say("flgo", "flgo", updates=Counting.arrivals)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)
        main(JOB)
