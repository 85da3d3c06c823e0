"""The job on NVFlare's simulator: its FedAvg over as many sites as are at work at once, each in a process.

    python -m benchmarks.peers.with_nvflare JOB

NVFlare's buffered asynchronous recipe (nvflare.edge) runs devices in real time and pauses half a second before each, so the
simulator's rounds are its fastest mode. With fewer processes than sites (``num_threads``) a process starts each site anew in every
round, which takes seconds. Parameters stay torch tensors on their way.
"""

import tempfile

from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.client.config import ExchangeFormat
from nvflare.recipe import SimEnv

from benchmarks.peers import nvflare_client
from benchmarks.peers.job import Job, network, told
from benchmarks.peers.tally import say


def main(job: Job) -> None:
    recipe = FedAvgRecipe(
        name="job",
        model=network(job.network),
        min_clients=job.concurrency,
        num_rounds=job.num_updates // job.concurrency,
        train_script=nvflare_client.__file__,
        server_expected_format=ExchangeFormat.PYTORCH,
    )
    with tempfile.TemporaryDirectory() as folder:
        recipe.execute(SimEnv(num_clients=job.concurrency, workspace_root=folder))
    say("nvflare", "nvflare", updates=job.num_updates, note="synchronous rounds of the simulator")


if __name__ == "__main__":
    main(told())
