"""Regression tests: dropout that ignored the seed, and stale work in a synchronous round."""

import numpy as np
import scenarios
import torch
from torch import Tensor, nn

from fedecho.algorithms import FedAvg
from fedecho.core.layout import Layout
from fedecho.core.server import Receipt, Server
from fedecho.core.types import Dispatch, GlobalModel, Left
from fedecho.distill.distiller import Adam, Distiller
from fedecho.distill.student import Student
from fedecho.learning import LocalTraining, Trainer


def test_synchronous_server_sees_no_stale_work() -> None:
    """A client that has reported goes away. Its update is in the buffer, so nobody may be sent x_t in its place."""
    model, rng = scenarios.published(scenarios.first_model()), np.random.default_rng(0)
    server = Server(algorithm=FedAvg(buffer_size=2), model=model, num_clients=4, concurrency=2, seed=0)

    def answer(dispatch: Dispatch) -> Receipt:
        return server.receive(scenarios.update_of(scenarios.draw_sent(rng, dispatch.client, dispatch.model.version)))

    first, second = server.refill()
    answer(first)
    server.receive(Left(first.client))
    extra = server.refill()
    answer(second)
    server.advance()
    server.refill()
    assert [answer(dispatch).staleness for dispatch in extra] in ([], [0])


INPUTS = torch.arange(32.0).reshape(8, 4) / 10


class Rows:
    """A task without randomness of its own."""

    def num_examples(self, client: int) -> int:
        return 8

    def batch(self, client: int, rows: Tensor, generator: torch.Generator) -> Tensor:
        return INPUTS[rows]

    def loss(self, module: nn.Module, batch: Tensor) -> Tensor:
        return module(batch).square().mean()


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))


def test_job_with_dropout_depends_on_its_seed_alone() -> None:
    module = with_dropout()
    layout = Layout.of(module)
    trainer = Trainer(Rows(), LocalTraining(batch_size=4, client_lr=0.1), layout.bind(module))
    job = Dispatch(0, 0, GlobalModel(0, layout.pack(module)), seed=1)
    assert torch.equal(trainer.train(job).delta, trainer.train(job).delta)


def test_distillation_with_dropout_depends_on_its_seed_alone() -> None:
    module = with_dropout()
    layout = Layout.of(module)
    student = Student(layout.bind(module), lambda net, rows: net(INPUTS[rows]), len(INPUTS))
    weights, teacher = layout.pack(module), INPUTS[:, :3]

    def distilled() -> Tensor:
        return (
            Distiller(distill_lr=0.1, batch_size=4).distill(student, Adam.fresh(weights.params), weights, teacher, 0)[1].params
        )

    assert torch.equal(distilled(), distilled())
