"""The job on pfl-research's simulated backend. It has no asynchronous mode: federated averaging over cohorts of the buffer's size.

    python -m benchmarks.peers.with_pfl JOB

Several workers are several processes of torch.distributed, as pfl documents (``torchrun``). On one GPU they share it, which its
guide advises and its release does not do: it gives every process the card of its number, and NCCL takes no two on one card. So here
all get the first card, and Gloo. ``options``: "bf16" is its ``amp_dtype``, "compiled" its ``use_torch_compile``.
"""

import os

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.peers.absent import stand_in_for
from benchmarks.peers.job import Job, examples, network, settle, told
from benchmarks.peers.tally import say

stand_in_for("dp_accounting", "prv_accountant")

JOB = told()
os.environ.setdefault("PFL_PYTORCH_DEVICE", JOB.device)
if JOB.device == "cuda" and JOB.workers > 1:
    start_group = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend: start_group(backend="gloo")  # type: ignore[assignment, misc]
    torch.cuda.set_device = lambda device: None  # type: ignore[assignment]

from pfl.aggregate.simulate import SimulatedBackend  # noqa: E402
from pfl.algorithm.base import NNAlgorithmParams  # noqa: E402
from pfl.algorithm.federated_averaging import FederatedAveraging  # noqa: E402
from pfl.data.dataset import Dataset  # noqa: E402
from pfl.data.federated_dataset import FederatedDataset  # noqa: E402
from pfl.hyperparam import NNTrainHyperParams  # noqa: E402
from pfl.model.pytorch import PyTorchModel  # noqa: E402


class WithLoss(nn.Module):
    """pfl asks the module for its loss."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def loss(self, images: Tensor, labels: Tensor, **_: object) -> Tensor:
        self.train()
        return cross_entropy(self.module(images), labels)

    def metrics(self, images: Tensor, labels: Tensor, **_: object) -> dict[str, object]:
        return {}


def model_of(job: Job) -> PyTorchModel:
    module = WithLoss(network(job.network))
    return PyTorchModel(
        module,
        torch.optim.SGD,
        torch.optim.SGD(module.parameters(), lr=1.0),
        amp_dtype=torch.bfloat16 if "bf16" in job.options else None,
        use_torch_compile="compiled" in job.options,
    )


def users_of(job: Job) -> FederatedDataset:
    """Clients in turn, whose examples are already where they are used."""
    clients = [Dataset(raw_data=list(examples(job, client)), user_id=str(client)) for client in range(job.num_clients)]
    numbers = iter(range(10**9))
    return FederatedDataset(lambda client: clients[client], lambda: next(numbers) % job.num_clients)


def main(job: Job) -> None:
    settle(job)
    model, users = model_of(job), users_of(job)
    algorithm = FederatedAveraging()
    params = NNAlgorithmParams(
        central_num_iterations=job.num_versions,
        evaluation_frequency=job.num_versions,  # never but at the first: nobody else evaluates
        train_cohort_size=job.buffer_size,
        val_cohort_size=0,
    )
    local = NNTrainHyperParams(
        local_batch_size=job.batch_size,
        local_learning_rate=job.client_lr,
        local_num_epochs=job.num_local_steps // -(-job.num_examples // job.batch_size),
    )
    algorithm.run(algorithm_params=params, backend=SimulatedBackend(users, users), model=model, model_train_params=local)
    if job.device != "cpu":
        torch.cuda.synchronize()
    if os.environ.get("RANK", "0") == "0":
        say("pfl", "pfl", updates=job.num_versions * job.buffer_size, note="synchronous (no asynchronous mode)")


if __name__ == "__main__":
    main(JOB)
