"""A client's training against the optimizers of torch on the same batches."""

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from blobs import Blobs, dispatch_of, network, reference, trainer_of
from torch import Tensor, nn

from fedecho.learning import LocalTraining
from fedecho.tasks.vision.digits import small_cnn

SGD = LocalTraining(client_lr=0.1, epochs=3, batch_size=4)


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_sgd_is_bit_equal_to_that_of_torch(weight_decay: float) -> None:
    module, local = network(), replace(SGD, weight_decay=weight_decay)
    trainer, dispatch = trainer_of(module, local), dispatch_of(module)
    update = trainer.train(dispatch)
    expected, losses = reference(
        module, trainer.task, lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=weight_decay)
    )
    assert torch.equal(update.delta, expected.params - dispatch.model.weights.params)
    assert torch.equal(update.buffers, expected.buffers)
    assert update.metrics["train_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert update.delta.abs().max() > 0.05


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.8)])
def test_adamw_is_close_to_that_of_torch(weight_decay: float, betas: tuple[float, float]) -> None:
    module = network()
    local = LocalTraining(
        optimizer="adamw",
        client_lr=0.01,
        epochs=5,
        batch_size=4,
        weight_decay=weight_decay,
        beta1=betas[0],
        beta2=betas[1],
        eps=1e-6,
    )
    trainer, dispatch = trainer_of(module, local), dispatch_of(module)
    update = trainer.train(dispatch)
    expected, _ = reference(
        module,
        trainer.task,
        lambda params: torch.optim.AdamW(params, lr=0.01, betas=betas, eps=1e-6, weight_decay=weight_decay),
    )
    torch.testing.assert_close(dispatch.model.weights.params + update.delta, expected.params, rtol=0, atol=2e-6)
    torch.testing.assert_close(update.buffers, expected.buffers, rtol=1e-5, atol=1e-6)
    assert update.delta.abs().max() > 0.05


class Images(Blobs):
    """The same points as images of one channel and 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.inputs = [torch.randn(len(mine), 1, 8, 8, generator=generator) for mine in self.labels]


def test_a_convolutional_network_is_trained_as_torch_trains_it_channels_last() -> None:
    torch.manual_seed(0)
    module = small_cnn(width=4)
    trainer, dispatch = trainer_of(module, SGD), dispatch_of(module)
    trainer = replace(trainer, task=Images())
    update = trainer.train(dispatch)
    expected, _ = reference(
        module.to(memory_format=torch.channels_last), trainer.task, lambda params: torch.optim.SGD(params, lr=0.1)
    )
    torch.testing.assert_close(dispatch.model.weights.params + update.delta, expected.params, rtol=0, atol=1e-5)


def test_the_proximal_term_is_the_gradient_of_the_explicit_loss() -> None:
    module = network()
    local = replace(SGD, proximal=0.7)
    trainer, dispatch = trainer_of(module, local), dispatch_of(module)
    update = trainer.train(dispatch)
    start = [param.detach().clone() for param in module.parameters()]

    def proximal(plain: nn.Module) -> Tensor:
        pairs = zip(plain.parameters(), start, strict=True)
        return 0.7 / 2 * sum((param - at).square().sum() for param, at in pairs)

    expected, losses = reference(module, trainer.task, lambda params: torch.optim.SGD(params, lr=0.1), proximal)
    plain, _ = reference(module, trainer.task, lambda params: torch.optim.SGD(params, lr=0.1))
    reached = dispatch.model.weights.params + update.delta
    torch.testing.assert_close(reached, expected.params, rtol=0, atol=2e-6)
    assert (reached - plain.params).abs().max() > 1e-2, "without the term it would end elsewhere"
    assert update.metrics["train_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5), "the loss without the term"


@pytest.mark.parametrize(("client", "batch_size"), [(0, 4), (1, 4), (2, 12), (3, 50), (4, 1)])
def test_an_epoch_sees_every_example_once_and_keeps_the_partial_batch(client: int, batch_size: int) -> None:
    local = LocalTraining(epochs=3, batch_size=batch_size, optimizer="adamw")
    trainer = trainer_of(nn.Linear(6, 4), local)
    update = trainer.train(dispatch_of(nn.Linear(6, 4), client=client))
    n, rows = 10 + client, trainer.task.rows
    per_epoch = -(-n // batch_size)
    assert (update.num_steps, update.num_examples, len(rows)) == (3 * per_epoch, n, 3 * per_epoch)
    epochs = [list(chain(*rows[k * per_epoch : (k + 1) * per_epoch])) for k in range(3)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3, "every epoch is shuffled anew"
    assert {len(batch) for batch in rows} == {min(batch_size, n), n % batch_size or min(batch_size, n)}


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7, 20])
def test_num_local_steps_counts_steps_whatever_the_epochs(steps: int) -> None:
    """Client 1 has 11 examples, 3 batches of 4, 4 and 3 a pass."""
    local = replace(SGD, epochs=1, num_local_steps=steps)
    trainer = trainer_of(network(), local)
    update = trainer.train(dispatch_of(network()))
    sizes = [len(batch) for batch in trainer.task.rows]
    assert update.num_steps == steps
    assert sizes == ([4, 4, 3] * steps)[:steps]


def train(seed: int = 5, client: int = 1, **options: Any) -> Any:
    local = LocalTraining(client_lr=0.1, epochs=2, batch_size=4)
    module = network(options.pop("dropout", 0.0))
    return trainer_of(module, local, **options).train(dispatch_of(module, seed=seed, client=client))


@pytest.mark.parametrize("options", [{}, {"jitter": 0.3}, {"dropout": 0.4}, {"jitter": 0.3, "dropout": 0.4}])
def test_same_seed_same_bytes_and_another_seed_others(options: dict[str, float]) -> None:
    """Shuffling, augmentation and dropout all draw from the job's seed and leave the caller's generator alone."""
    torch.manual_seed(1)
    one = train(**options)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    other = train(**options)
    torch.manual_seed(2)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.delta, other.delta)
    assert torch.equal(one.buffers, other.buffers)
    assert one.metrics == other.metrics
    assert not torch.equal(train(seed=6, **options).delta, one.delta)


def test_a_job_moves_nobody_elses_random_numbers() -> None:
    module = network(dropout=0.5)
    trainer, dispatch = trainer_of(module, SGD, jitter=0.1), dispatch_of(module)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    trainer.train(dispatch)
    assert torch.equal(torch.rand(4), expected)


def test_a_trainer_remembers_nothing_of_earlier_jobs() -> None:
    """Neither weights nor statistics nor gradients nor moments; even if the network was left in eval mode."""
    module = network()
    for optimizer in ("sgd", "adamw"):
        local = LocalTraining(optimizer=optimizer, client_lr=0.05, batch_size=4)
        trainer = trainer_of(module, local)
        first = trainer.train(dispatch_of(module))
        trainer.train(dispatch_of(network(), client=4, seed=8))
        trainer.network.grads.fill_(100.0)
        trainer.network.module.eval()
        again = trainer.train(dispatch_of(module))
        assert torch.equal(first.delta, again.delta)
        assert torch.equal(first.buffers, again.buffers)


def test_the_model_that_was_sent_is_not_written_to_and_the_update_is_a_copy() -> None:
    module = network()
    trainer, dispatch = trainer_of(module, replace(SGD, proximal=0.1)), dispatch_of(module)
    kept = dispatch.model.weights.clone()
    update = trainer.train(dispatch)
    delta, buffers = update.delta.clone(), update.buffers.clone()
    trainer.train(dispatch_of(module, client=4, seed=1))
    assert torch.equal(dispatch.model.weights.params, kept.params)
    assert torch.equal(dispatch.model.weights.buffers, kept.buffers)
    assert torch.equal(update.delta, delta)
    assert torch.equal(update.buffers, buffers)
    assert (update.client, update.base_version) == (1, 2)


def test_a_frozen_layer_is_not_trained() -> None:
    module = network()
    module[0].requires_grad_(False)
    trainer = trainer_of(module, SGD)
    update = trainer.train(dispatch_of(module))
    assert update.delta.shape == (8 + 8 + 32,)
    assert torch.equal(trainer.network.module[0].weight, module[0].weight)


def test_without_control_variates_there_is_no_correction() -> None:
    module = network()
    assert trainer_of(module, SGD).train(dispatch_of(module)).correction is None
