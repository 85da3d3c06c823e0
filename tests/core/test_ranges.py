"""Ranges of settings: error messages, and that every number of a configuration has a range."""

import pickle
from dataclasses import dataclass, fields
from math import inf, nan
from typing import Annotated, Any, Literal, get_type_hints

import numpy as np
import pytest

from fedecho import ALGORITHMS, TASKS, Distiller, Experiment, Faults, FedBuff, LocalTraining, Runtimes
from fedecho.core.admission import Admission
from fedecho.core.ranges import Range, SettingError, at_least, between, check_ranges, positive, ranges_of, share
from fedecho.flower.config import Settings
from fedecho.flower.grid import Waiting
from fedecho.learning.privacy import Privacy
from fedecho.runs.execution import Execution
from fedecho.simulation.attacks import Attack
from fedecho.tasks.partition import PARTITIONERS


@dataclass(frozen=True, kw_only=True)
class Oven:
    trays: Annotated[int, at_least(1, most=4)] = 2
    degrees: Annotated[float, positive(most=300.0)] = 180.0
    minutes: Annotated[float, positive(most=inf, note=" (inf for ever)")] = 20.0
    door: Annotated[float, share(below=True)] | None = None
    salt: Annotated[int, between(0, 9)] | Literal["enough"] = "enough"
    heat: Literal["top", "bottom"] = "top"
    name: str = "oven"

    def __post_init__(self) -> None:
        check_ranges(self, "oven.")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"trays": 0}, "oven.trays must be at least 1, got 0: choose a value from 1 to 4"),
        ({"trays": 2**62}, "oven.trays must be at most 4, got 4611686018427387904: choose a value from 1 to 4"),
        ({"trays": 2.0}, "oven.trays must be a whole number, got 2.0"),
        ({"trays": True}, "oven.trays must be a whole number, got True"),
        ({"trays": None}, "oven.trays must be a whole number, got None"),
        ({"degrees": 0}, "oven.degrees must be above 0, got 0: choose a value above 0 and at most 300"),
        ({"degrees": 1e-45}, "oven.degrees must be above 0, got 1e-45, which float32 may round to 0"),
        ({"degrees": nan}, "oven.degrees must be above 0, got nan: choose a value above 0 and at most 300"),
        ({"degrees": inf}, "oven.degrees must be at most 300, got inf: choose a value above 0 and at most 300"),
        ({"degrees": "hot"}, "oven.degrees must be a number, got 'hot'"),
        ({"degrees": 10**30}, f"oven.degrees must be at most 300, got 1{'0' * 30}: choose a value above 0 and at most 300"),
        ({"minutes": -1.0}, "oven.minutes must be above 0 (inf for ever), got -1.0"),
        ({"door": 1}, "oven.door must be at least 0 and below 1, got 1"),
        ({"salt": 10}, "oven.salt must be between 0 and 9, got 10"),
        ({"salt": "much"}, "oven.salt must be a whole number, got 'much'"),
        ({"heat": "both"}, "oven.heat must be 'top' or 'bottom', got 'both'"),
        ({"heat": ["top"]}, "oven.heat must be 'top' or 'bottom', got ['top']"),
        (
            {"trays": -(10**5000)},
            "oven.trays must be at least 1, got a number of thousands of digits: choose a value from 1 to 4",
        ),
        ({"heat": "x" * 99}, f"oven.heat must be 'top' or 'bottom', got '{'x' * 39}... (101 characters)"),
    ],
)
def test_a_value_out_of_its_range_is_one_line_that_says_what_to_do(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingError) as caught:
        Oven(**wrong)
    assert str(caught.value) == told
    assert str(pickle.loads(pickle.dumps(caught.value))) == told  # noqa: S301 (ours): a worker's error travels


def test_ends_are_in_the_range_unless_it_says_so() -> None:
    for right in ({"trays": 1}, {"trays": 4}, {"degrees": 300}, {"minutes": inf}, {"door": 0.0}, {"salt": 9}, {"door": None}):
        Oven(**right)  # type: ignore[arg-type]
    Oven(trays=np.int64(3), degrees=np.float32(200.0))  # type: ignore[arg-type]


def test_a_subclass_keeps_the_ranges_and_adds_its_own() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Stove(Oven):
        plates: Annotated[int, Range(1, 6)] = 4
        lid: "Lid | None" = None  # type: ignore[name-defined]  # noqa: F821 (a text until somebody asks)

    with pytest.raises(ValueError, match=r"oven.plates must be at most 6, got 7"):
        Stove(plates=7)
    with pytest.raises(ValueError, match=r"oven.trays must be at least 1"):
        Stove(trays=0)


SECTIONS = [Experiment, LocalTraining, Distiller, Runtimes, Faults, Admission, Privacy, Attack, Execution, Waiting, Settings]
CONFIGURABLE = [*SECTIONS, *TASKS.values(), *ALGORITHMS.values(), *PARTITIONERS.values()]


@pytest.mark.parametrize("cls", CONFIGURABLE, ids=lambda cls: cls.__name__)
def test_every_number_of_a_configuration_has_a_range(cls: type[Any]) -> None:
    hints, ranges = get_type_hints(cls), ranges_of(cls)
    for each in fields(cls):
        kinds = {hints[each.name], *getattr(hints[each.name], "__args__", ())}
        if not each.repr or not kinds & {int, float}:
            continue
        declared = ranges[each.name].allowed
        assert declared is not None, each.name
        assert declared.most < inf or "inf" in declared.note, each.name


@pytest.mark.parametrize("cls", CONFIGURABLE, ids=lambda cls: cls.__name__)
def test_ranges_that_are_declared_are_checked(cls: type[Any]) -> None:
    needed = {
        "buffer_size": 2,
        "num_clients": 4,
        "inner": FedBuff(buffer_size=2),
        "alpha": 0.1,
        "concurrency": 2,
        "num_versions": 1,
    }
    needed |= {"task": TASKS["digits"](num_clients=4), "algorithm": FedBuff(buffer_size=2), "local": LocalTraining()}
    given = {each.name: needed[each.name] for each in fields(cls) if each.name in needed}
    for name, declared in ranges_of(cls).items():
        if declared.allowed is not None:
            for absurd in (declared.allowed.least - 1, nan if not declared.is_whole else 2**70):
                with pytest.raises(ValueError, match=name):
                    cls(**{**given, name: absurd})
