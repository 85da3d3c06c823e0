"""The quickstart's server with FedEcho's three lines in place of FedAvg's."""

from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from torch.utils.data import DataLoader

from fedecho import Distiller, FedBuff, FedEcho
from fedecho.flower import AsyncStrategy
from quickstart.task import Net, images, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    torch.manual_seed(0)
    global_model = Net()
    arrays = ArrayRecord(global_model.state_dict())
    folder = context.run_config["folder"]

    if context.run_config["method"] == "fedbuff":
        strategy = AsyncStrategy(algorithm=FedBuff(buffer_size=2), num_clients=3, folder=folder)
    else:
        method = FedEcho(inner=FedBuff(buffer_size=2), distiller=Distiller(distill_lr=1e-4, batch_size=50))
        unlabeled = images(400, seed=99).tensors[0]
        strategy = AsyncStrategy(algorithm=method, num_clients=3, folder=folder, module=global_model, unlabeled=unlabeled)
    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=ConfigRecord({"lr": context.run_config["learning-rate"]}),
        num_rounds=context.run_config["num-server-rounds"],
        evaluate_fn=global_evaluate,
    )

    torch.save(result.arrays.to_torch_state_dict(), Path(folder) / "final_model.pt")


def global_evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    model = Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    loss, accuracy = test(model, DataLoader(images(1000, seed=77), batch_size=100), torch.device("cpu"))
    return MetricRecord({"accuracy": accuracy, "loss": loss})
