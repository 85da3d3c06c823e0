"""Your own task in thirty lines: data, a model, a loss, an unlabeled set and an evaluation.

Each client has mostly points of one half-moon; the server has points without labels.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedecho import Distiller, Experiment, FedBuff, FedEcho, LocalTraining, simulate


def moons(num: int, share: float, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    labels = (torch.rand(num, generator=draw) < share).long()
    angle = torch.rand(num, generator=draw) * torch.pi
    side = 1 - 2 * labels
    points = torch.stack([angle.cos() + labels, side * angle.sin() + labels / 2], dim=1)
    return points + 0.15 * torch.randn(num, 2, generator=draw), labels


class Moons:
    num_clients, num_unlabeled = 12, 200
    clients = tuple(moons(30, 0.05 if client % 2 else 0.95, client) for client in range(12))
    unlabeled, test = moons(200, 0.5, 100)[0], moons(1000, 0.5, 101)

    def network(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))

    def num_examples(self, client: int) -> int:
        return len(self.clients[client][1])

    def batch(self, client: int, rows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        points, labels = self.clients[client]
        return points[rows], labels[rows]

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(module(batch[0]), batch[1])

    def logits(self, module: nn.Module, rows: Tensor) -> Tensor:
        return module(self.unlabeled[rows])

    def evaluate(self, module: nn.Module) -> Mapping[str, float]:
        return {"accuracy": float((module(self.test[0]).argmax(1) == self.test[1]).float().mean())}


if __name__ == "__main__":
    for algorithm in (FedBuff(buffer_size=3), FedEcho(inner=FedBuff(buffer_size=3), distiller=Distiller(distill_lr=1e-3))):
        local = LocalTraining(client_lr=0.3, epochs=5, batch_size=10)
        result = simulate(Experiment(task=Moons(), algorithm=algorithm, local=local, concurrency=6, num_versions=60))
        print(f"{type(algorithm).__name__}: {100 * result.accuracy:.1f} %")
