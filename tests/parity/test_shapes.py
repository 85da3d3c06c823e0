"""The shapes in the signatures of ``fedecho.distill`` are checked at run time."""

from collections.abc import Callable
from typing import Any

import pytest
import scenarios
import torch
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped

from fedecho.algorithms import FedBuff, FedEcho
from fedecho.distill import distiller, loss
from fedecho.distill.bank import Bank
from fedecho.distill.student import Student

PURE = ("normalized_entropy", "soft_weight", "distillation_loss", "clip_factor")


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    return jaxtyped(typechecker=beartype)(function)


def test_right_shapes_pass() -> None:
    rows, scalar = torch.zeros(4, 3), torch.tensor(0.5)
    checked(loss.normalized_entropy)(rows)
    checked(loss.soft_weight)(scalar, 0.2, 0.8)
    checked(loss.distillation_loss)(rows, rows)
    checked(loss.clip_factor)(scalar, 5.0)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("normalized_entropy", (torch.zeros(3),)),
        ("normalized_entropy", (torch.zeros(2, 4, 3),)),
        ("normalized_entropy", (torch.zeros(4, 3, dtype=torch.long),)),
        ("soft_weight", (torch.zeros(4), 0.2, 0.8)),
        ("distillation_loss", (torch.zeros(4, 3), torch.zeros(5, 3))),
        ("distillation_loss", (torch.zeros(4, 3), torch.zeros(4, 2))),
        ("distillation_loss", (torch.zeros(4, 3), torch.zeros(4))),
        ("clip_factor", (torch.ones(1), 5.0)),
    ],
)
def test_wrong_shapes_raise(name: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeCheckError):
        checked(getattr(loss, name))(*arguments)


def test_bank_takes_one_row_of_logits_per_example() -> None:
    bank = Bank(4, 3, torch.device("cpu"))
    checked(Bank.put)(bank, 0, torch.zeros(4, 3), 0)
    with pytest.raises(TypeCheckError):
        checked(Bank.put)(bank, 0, torch.zeros(12), 0)
    assert checked(Bank.teacher)(bank).shape == (4, 3)


def test_a_run_of_fedecho_keeps_to_the_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every annotation checked on the way, through inference, bank, loss and clipping."""
    for name in PURE:
        monkeypatch.setattr(loss, name, checked(getattr(loss, name)))
    for name in ("distillation_loss", "clip_factor"):
        monkeypatch.setattr(distiller, name, getattr(loss, name))
    for owner, name in ((Bank, "put"), (Bank, "teacher"), (Student, "infer")):
        monkeypatch.setattr(owner, name, checked(getattr(owner, name)))
    student = scenarios.linear_student(scenarios.unlabeled(), torch.float32)
    algorithm = FedEcho(inner=FedBuff(buffer_size=4), distiller=distiller.Distiller(batch_size=5), student=student)
    models = scenarios.play(algorithm, scenarios.first_model(), scenarios.draw_rounds(num_versions=3), torch.float32)
    assert len(models) == 4
