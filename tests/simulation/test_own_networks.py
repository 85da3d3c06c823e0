"""A user's own network runs unchanged and loads every saved model."""

from pathlib import Path

import pytest
import torch
from own_networks import Net, Odd, OwnImages, experiment_of
from safetensors.torch import load_file
from torch import nn

from fedecho import FedBuff, FedEcho, simulate, trained
from fedecho.distill import Distiller
from fedecho.learning.local import LocalTraining

FEDBUFF = FedBuff(buffer_size=2)


def seen(module: nn.Module) -> dict[str, tuple[object, ...]]:
    told = {name: (id(t), t.stride(), t.requires_grad, t.tolist()) for name, t in module.named_parameters()}
    told |= {name: (id(t), t.tolist()) for name, t in module.named_buffers()}
    return told | {f"layer {name}": (id(layer), layer.training) for name, layer in module.named_modules()}


@pytest.mark.parametrize("make", [Net, Odd])
@pytest.mark.parametrize("distilled", [False, True])
def test_the_users_module_is_left_alone_and_takes_the_model(make: type[nn.Module], distilled: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    task = OwnImages(make())
    before = seen(task.module)
    method = FedEcho(inner=FEDBUFF, distiller=Distiller(batch_size=3)) if distilled else FEDBUFF
    result = simulate(experiment_of(task, method), out=tmp_path / "run")
    assert seen(task.module) == before
    module = make()
    module.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"), strict=True)
    last = "head.weight" if make is Odd else "fc3.weight"
    assert not torch.equal(module.get_parameter(last), task.module.get_parameter(last)), "it has learnt something"
    again = make()
    again.load_state_dict(result.named, strict=True)
    third = trained(tmp_path / "run", experiment_of(task, method))
    assert seen(task.module) == before
    scores = [task.evaluate(each.eval()) for each in (module, again, third)]
    assert scores == [{"accuracy": result.summary.final_accuracy}] * 3
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
        assert torch.equal(tensor, third.state_dict()[name])


def test_flowers_quickstart_network_gives_the_same_bytes_in_a_pool() -> None:
    torch.manual_seed(0)
    experiment = experiment_of(OwnImages(), FEDBUFF, num_versions=2)
    serial, pool = simulate(experiment), simulate(experiment, executor="pool", workers=1)
    assert serial.summary.model_sha256 == pool.summary.model_sha256
    assert all(torch.equal(serial.named[name], pool.named[name]) for name in serial.named)


def test_its_steps_are_those_of_torch_in_its_own_memory_format() -> None:
    """One client, one job, one SGD step, by hand."""
    torch.manual_seed(0)
    task = OwnImages(num_clients=1)
    local = LocalTraining(client_lr=0.05, num_local_steps=1, batch_size=6)
    result = simulate(experiment_of(task, FedBuff(buffer_size=1), num_versions=1, concurrency=1, local=local))
    plain = Net()
    plain.load_state_dict(task.module.state_dict())
    task.loss(plain, task.batch(0, torch.arange(6), torch.Generator())).backward()
    for name, param in plain.named_parameters():
        assert param.grad is not None
        torch.testing.assert_close(result.named[name], (param - 0.05 * param.grad).detach(), rtol=1e-5, atol=1e-6)
