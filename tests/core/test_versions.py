"""A model is kept for as long as clients train from it."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedecho.core.types import GlobalModel, Weights
from fedecho.core.versions import Versions


def model(version: int) -> GlobalModel:
    return GlobalModel(version, Weights(torch.tensor([float(version)]), torch.zeros(0)))


def test_the_current_model_is_alive_without_a_reference() -> None:
    versions = Versions(model(0))
    assert (versions.num_alive, versions.models, versions.references) == (1, {}, {})


def test_an_old_model_is_forgotten_with_its_last_reference() -> None:
    versions, first = Versions(model(0)), None
    first = versions.acquire()
    assert versions.acquire() is first
    versions.publish(model(1))
    assert versions.num_alive == 2
    assert versions.release(0) is first
    assert versions.num_alive == 2
    assert versions.release(0) is first
    assert (versions.num_alive, versions.models, versions.references) == (1, {}, {})


def test_the_current_model_survives_its_last_release() -> None:
    versions = Versions(model(3))
    versions.acquire()
    versions.release(3)
    assert versions.acquire().version == 3


def test_releasing_what_nobody_holds_is_an_error() -> None:
    versions = Versions(model(0))
    versions.publish(model(1))
    with pytest.raises(KeyError):
        versions.release(0)


actions = st.lists(st.tuples(st.sampled_from(["acquire", "release", "publish"]), st.integers(0, 100)), max_size=60)


@given(actions)
@settings(max_examples=50, deadline=None)
def test_versions_agree_with_a_list_of_holders(actions: list[tuple[str, int]]) -> None:
    """The plain model: a list with the version of every open dispatch, and the newest version."""
    versions, holders, newest, peak = Versions(model(0)), [], 0, 1
    for action, which in actions:
        if action == "acquire":
            assert versions.acquire().version == newest
            holders.append(newest)
        elif action == "release" and holders:
            version = holders.pop(which % len(holders))
            assert versions.release(version).version == version
        elif action == "publish":
            newest += 1
            versions.publish(model(newest))
            peak = max(peak, len({*holders, newest}))
        assert versions.references == Counter(holders)
        assert {version: kept.version for version, kept in versions.models.items()} == {v: v for v in holders}
        assert versions.num_alive == len({*holders, newest})
        assert versions.peak_alive == peak
        assert versions.num_alive <= len(holders) + 1
