"""FedAC's clients against a loop with autograd that follows the description line by line."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from blobs import Blobs, dispatch_of, network, ordered, trainer_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedecho.core.layout import Layout
from fedecho.learning import LocalTraining, Trainer

LOCAL = LocalTraining(client_lr=0.05, epochs=2, batch_size=4, control_variates=True)
SIZE = sum(param.numel() for param in network().parameters())
GENERATOR = torch.Generator().manual_seed(0)
C, C_I = (0.1 * torch.randn(SIZE, generator=GENERATOR) for _ in range(2))
CASES = [(None, None), (C, None), (None, C_I), (C, C_I)]
NAMES = ["neither", "c", "c_i", "both"]


def raw_gradient(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss = cross_entropy(module(batch[0]), batch[1])
    return parameters_to_vector(torch.autograd.grad(loss, ordered(module))).detach()


def loop(
    task: Blobs, c: Tensor | None, c_i: Tensor | None, optimizer: str, **settings: float
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(x_s, y, the raw gradients on the way): y -= lr (g + c - c_i), AdamW on g + c - c_i, or AdamW on g and -lr (c - c_i)."""
    module = network()
    start = parameters_to_vector(ordered(module)).detach().clone()
    shift = (torch.zeros(SIZE) if c is None else c) - (torch.zeros(SIZE) if c_i is None else c_i)
    y, seen = start.clone().requires_grad_(), []
    adamw = torch.optim.AdamW([y], lr=LOCAL.client_lr, **{"weight_decay": 0.0, **settings})  # type: ignore[arg-type]
    for batch in task.batches:
        vector_to_parameters(y.detach(), ordered(module))
        seen.append(raw_gradient(module, batch))
        if optimizer == "sgd":
            y = y - LOCAL.client_lr * (seen[-1] + shift)
        else:
            y.grad = seen[-1] + shift if optimizer == "adamw" else seen[-1]
            adamw.step()
            if optimizer == "adamw, its step":
                with torch.no_grad():
                    y -= LOCAL.client_lr * shift
    return start, y.detach(), seen


@pytest.mark.parametrize(("c", "c_i"), CASES, ids=NAMES)
def test_sgd_corrects_every_step_and_reports_how_the_control_variate_moved(c: Tensor | None, c_i: Tensor | None) -> None:
    trainer = trainer_of(network(), LOCAL)
    update = trainer.train(dispatch_of(network(), correction=c), c_i)
    start, y, seen = loop(trainer.task, c, c_i, "sgd")
    c0 = torch.zeros(SIZE) if c is None else c
    old = torch.zeros(SIZE) if c_i is None else c_i
    new = old - c0 + (start - y) / (len(seen) * LOCAL.client_lr)
    torch.testing.assert_close(start + update.delta, y, rtol=0, atol=2e-6)
    torch.testing.assert_close(update.correction, new - old, rtol=0, atol=1e-4)
    torch.testing.assert_close(old + update.correction, torch.stack(seen).mean(dim=0), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("c", "c_i"), CASES, ids=NAMES)
def test_adamw_steps_on_the_corrected_gradient_and_takes_the_mean_raw_one(c: Tensor | None, c_i: Tensor | None) -> None:
    trainer = trainer_of(network(), replace(LOCAL, optimizer="adamw"))
    update = trainer.train(dispatch_of(network(), correction=c), c_i)
    start, y, seen = loop(trainer.task, c, c_i, "adamw")
    old = torch.zeros(SIZE) if c_i is None else c_i
    torch.testing.assert_close(start + update.delta, y, rtol=0, atol=2e-5)
    torch.testing.assert_close(update.correction, torch.stack(seen).mean(dim=0) - old, rtol=0, atol=1e-5)


# A gradient that is nothing but rounding (of a bias before BatchNorm) is no direction: eps keeps AdamW from making it one.
OWN = {"weight_decay": 0.1, "eps": 1e-2}
STEP = replace(LOCAL, optimizer="adamw", corrected="step", **OWN)  # type: ignore[arg-type]


@pytest.mark.parametrize(("c", "c_i"), CASES, ids=NAMES)
def test_adamw_corrected_in_its_step_goes_by_the_difference_and_takes_its_own_mean_step(
    c: Tensor | None, c_i: Tensor | None
) -> None:
    """c_i' is what AdamW by itself made of the gradients, in units of lr: the difference that was added is taken out again."""
    trainer = trainer_of(network(), STEP)
    update = trainer.train(dispatch_of(network(), correction=c), c_i)
    start, y, seen = loop(trainer.task, c, c_i, "adamw, its step", **OWN)
    zero = torch.zeros(SIZE)
    shift, old = (zero if c is None else c) - (zero if c_i is None else c_i), zero if c_i is None else c_i
    torch.testing.assert_close(start + update.delta, y, rtol=0, atol=2e-5)
    mean_step = (start - y) / (len(seen) * LOCAL.client_lr) - shift
    torch.testing.assert_close(old + update.correction, mean_step, rtol=0, atol=1e-3)
    assert float((old + update.correction).abs().max()) < 2.5, "AdamW's steps are about lr long, and so is their mean"


def test_corrected_in_its_step_adamw_moves_a_word_that_is_not_there_by_as_much_as_the_difference() -> None:
    """The closed form: K lr (c - c_i), however small, where a corrected gradient would be a step of lr."""
    shift = torch.tensor([1.0, -1.0, 1e-3, -1e-3, 0.0, 0.0])
    local = LocalTraining(optimizer="adamw", client_lr=0.01, num_local_steps=8, control_variates=True, corrected="step")
    module = Words()
    trainer = Trainer(SomeWords(), local, Layout.of(module).bind(module))
    update = trainer.train(dispatch_of(Words(), correction=torch.cat([torch.zeros(4), shift])))
    torch.testing.assert_close(update.delta[4:], -8 * 0.01 * shift, rtol=0, atol=1e-6)
    torch.testing.assert_close(update.correction[4:], torch.zeros(6), rtol=0, atol=1e-4)  # type: ignore[index]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_what_is_handed_in_is_not_written_to(optimizer: str) -> None:
    c, c_i = C.clone(), C_I.clone()
    trainer = trainer_of(network(), replace(LOCAL, optimizer=optimizer))
    first = trainer.train(dispatch_of(network(), correction=c), c_i)
    kept = deepcopy(first.correction)
    trainer.train(dispatch_of(network(), correction=c, client=4), c_i)
    assert torch.equal(c, C)
    assert torch.equal(c_i, C_I)
    assert torch.equal(first.correction, kept)


def test_with_c_equal_to_c_i_the_steps_are_those_of_plain_sgd() -> None:
    plain = trainer_of(network(), replace(LOCAL, control_variates=False)).train(dispatch_of(network()))
    corrected = trainer_of(network(), LOCAL).train(dispatch_of(network(), correction=C), C.clone())
    assert torch.equal(plain.delta, corrected.delta)
    assert plain.correction is None
    assert corrected.correction is not None


class Words(nn.Module):
    """Ten words, of which clients have the first four: there are so many labels."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Parameter(torch.linspace(-1, 1, 10))


class SomeWords(Blobs):
    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (module.get_parameter("words")[batch[1]] - 5).square().mean()


@pytest.mark.parametrize("size", [1.0, 1e-5])
def test_adamw_moves_a_word_that_is_not_there_by_the_whole_rate_unless_told_not_to(size: float) -> None:
    """The closed form: of a constant gradient AdamW makes steps of lr, whatever its size (eps is far below)."""
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, 0.0])
    local = LocalTraining(optimizer="adamw", client_lr=0.01, num_local_steps=8, control_variates=True, eps=1e-12)
    updates = []
    for each in (local, replace(local, correct_unseen=False)):
        module = Words()
        trainer = Trainer(SomeWords(), each, Layout.of(module).bind(module))
        updates.append(trainer.train(dispatch_of(Words(), correction=torch.cat([torch.zeros(4), size * signs]))))
    everywhere, seen = (update.delta for update in updates)
    torch.testing.assert_close(everywhere[4:], -8 * 0.01 * signs, rtol=0, atol=1e-6)
    assert torch.equal(seen[4:], torch.zeros(6))
    assert torch.equal(seen[:4], everywhere[:4])
    assert (seen[:4] > 0.01).all()
    assert torch.equal(updates[0].correction, updates[1].correction)  # type: ignore[arg-type]


def test_other_forms_of_the_correction_are_for_adamw() -> None:
    with pytest.raises(ValueError, match=r"local\.correct_unseen=false is for local\.optimizer=adamw"):
        replace(LOCAL, correct_unseen=False)
    with pytest.raises(ValueError, match=r"local\.correct_unseen=false is for local\.corrected=gradient"):
        replace(STEP, correct_unseen=False)
    with pytest.raises(ValueError, match=r"local\.corrected must be 'gradient' or 'step', got 'both'"):
        replace(STEP, corrected="both")
    with pytest.raises(ValueError, match=r"local\.corrected=step is for local\.optimizer=adamw"):
        replace(STEP, optimizer="sgd")
