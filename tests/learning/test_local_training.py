"""The settings of local training."""

from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedecho.learning import LocalTraining


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"optimizer": "lion"}, r"local.optimizer must be 'sgd' or 'adamw', got 'lion'"),
        ({"client_lr": 0.0}, r"local.client_lr must be above 0, got 0.0"),
        ({"client_lr": -1.0}, r"local.client_lr must be above 0, got -1.0"),
        ({"client_lr": float("nan")}, r"local.client_lr must be above 0, got nan"),
        ({"num_local_steps": 0}, r"local.num_local_steps must be at least 1, got 0"),
        ({"epochs": 0}, r"local.epochs must be at least 1, got 0"),
        ({"batch_size": 0}, r"local.batch_size must be at least 1, got 0"),
        ({"weight_decay": -1e-4}, r"local.weight_decay must be at least 0, got -0.0001"),
        ({"proximal": -0.5}, r"local.proximal must be at least 0, got -0.5"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalTraining(**wrong)  # type: ignore[arg-type]


def test_defaults_are_those_of_the_paper() -> None:
    local = LocalTraining()
    assert (local.optimizer, local.epochs, local.batch_size, local.num_local_steps) == ("sgd", 2, 50, None)
    assert (local.beta1, local.beta2, local.eps) == (0.9, 0.999, 1e-8)
    assert (local.proximal, local.control_variates) == (0.0, False)


@given(st.integers(1, 5), st.integers(1, 60), st.integers(1, 500))
@settings(max_examples=50, deadline=None)
def test_steps_are_epochs_times_batches_rounded_up(epochs: int, batch_size: int, num_examples: int) -> None:
    local = LocalTraining(epochs=epochs, batch_size=batch_size)
    assert local.num_steps(num_examples) == epochs * ceil(num_examples / batch_size)


def test_num_local_steps_goes_before_epochs() -> None:
    assert LocalTraining(epochs=7, num_local_steps=3).num_steps(10_000) == 3
