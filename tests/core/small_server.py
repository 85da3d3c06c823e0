"""A server around a model of three numbers, and updates to feed it."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedecho.algorithms import FedAvg, FedBuff
from fedecho.core.server import Server
from fedecho.core.types import ClientUpdate, Dispatch, GlobalModel, Weights
from fedecho.storage.checkpoint import encode

NUM_PARAMS, NUM_BUFFERS = 3, 2


def first_model() -> GlobalModel:
    return GlobalModel(0, Weights(torch.tensor([1.0, -2.0, 0.5]), torch.tensor([0.25, 4.0])))


def make_server(
    *,
    num_clients: int = 5,
    concurrency: int = 3,
    algorithm: Any = None,
    seed: int = 0,
    admission: Any = None,
    variances: Tensor | None = None,
) -> Server[Any]:
    return Server(
        algorithm=algorithm or FedBuff(buffer_size=2),
        model=first_model(),
        num_clients=num_clients,
        concurrency=concurrency,
        seed=seed,
        admission=admission,
        variances=variances,
    )


def synchronous_server(*, num_clients: int = 5, concurrency: int = 3, seed: int = 0) -> Server[Any]:
    algorithm = FedAvg(buffer_size=concurrency)
    return make_server(num_clients=num_clients, concurrency=concurrency, algorithm=algorithm, seed=seed)


def good_update(client: int, base_version: int, value: float = 1.0) -> ClientUpdate:
    return ClientUpdate(
        client=client,
        base_version=base_version,
        delta=torch.tensor([0.5, 0.25, -1.0]) * value,
        buffers=torch.tensor([1.0, 2.0]) + value,
        num_examples=7,
        num_steps=3,
        correction=torch.tensor([0.1, 0.2, 0.3]) * value,
        metrics={"train_loss": value},
    )


def answer(server: Server[Any], client: int, value: float = 1.0, **changes: Any) -> ClientUpdate:
    """The update that the server waits for, with some fields changed."""
    return replace(good_update(client, server.open[client].base_version, value), **changes)


def answer_to(dispatch: Dispatch, value: float = 1.0) -> ClientUpdate:
    return good_update(dispatch.client, dispatch.model.version, value)


def contents(value: Any) -> tuple[Any, list[tuple[str, Tensor]]]:
    """Everything inside a state or a model, tensors as (dtype, bytes): equal only if equal to the last bit."""
    tensors: dict[str, Tensor] = {}
    tree = encode(value, tensors)
    return tree, [(str(tensor.dtype), tensor.numpy().tobytes()) for tensor in tensors.values()]
