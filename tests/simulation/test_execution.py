"""Validation of execution options, and which worker gets which GPU (with simulated GPUs)."""

import os
import sys
from typing import Any

import pytest
import torch
from hand_pool import HandPool, job

from fedecho.executors.pool import VISIBLE, visible_gpu
from fedecho.executors.ray_address import ENVIRONMENT, check_address, check_reachable, ray_settings
from fedecho.runs import execution
from fedecho.runs.execution import Execution, visible_gpus


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"executor": "cloud"}, "--executor must be one of serial, pool, cuda, ray, got 'cloud'"),
        (
            {"executor": "serial", "device": "cuda"},
            "use --executor cuda for one GPU, or --executor pool --device cuda for several",
        ),
        ({"executor": "cuda", "device": "cpu"}, "--executor cuda runs on a GPU: omit --device"),
        ({"executor": "pool", "device": "tpu"}, "--device must be 'cpu' or 'cuda', got 'tpu'"),
        ({"executor": "pool", "device": "cuda", "gpus": ()}, "--executor pool --device cuda needs NVIDIA GPUs"),
        (
            {"executor": "pool", "device": "cuda", "workers": 3, "gpus": ("0", "1")},
            r"--workers 3 needs one GPU per worker, but torch sees only 2 \(0, 1\): lower --workers",
        ),
        ({"executor": "pool", "workers": 4001}, "--workers 4001 is too many for this machine's cores"),
        ({"executor": "pool", "address": "auto"}, "--address auto needs --executor ray, got pool"),
    ],
)
def test_invalid_options_are_rejected_before_any_work(told: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Execution(**told)


def test_workers_have_a_gpu_each_by_default_all_there_are() -> None:
    two = Execution(executor="pool", device="cuda", gpus=("3", "5"))
    assert (two.num_workers, two.worker_gpus()) == (2, ("3", "5"))
    assert Execution(executor="pool", device="cuda", workers=1, gpus=("3", "5")).worker_gpus() == ("3",)
    assert Execution(executor="pool", device="cuda", gpus=("0", "0")).worker_gpus() == ("0", "0")


@pytest.mark.parametrize(
    ("variable", "count", "known"),
    [(None, 2, ("0", "1")), ("4,7", 2, ("4", "7")), ("GPU-5c, GPU-9d", 2, ("GPU-5c", "GPU-9d")), ("0,1,9", 2, ("0", "1"))],
)
def test_gpus_have_the_names_that_the_variable_gives_them(
    variable: str | None, count: int, known: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv(execution.VISIBLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(execution.VISIBLE, variable)
    assert visible_gpus() == known


@pytest.mark.parametrize("before", [None, "0,1"])
def test_a_process_is_shown_its_gpu_alone(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    if before is not None:
        monkeypatch.setenv(VISIBLE, before)
    with visible_gpu("1"):
        assert os.environ[VISIBLE] == "1"
    assert os.environ.get(VISIBLE) == before
    with visible_gpu(None):
        assert os.environ.get(VISIBLE) == before


def test_a_dead_workers_replacement_gets_its_gpu() -> None:
    pool = HandPool(2, gpus=("4", "7"))
    assert pool.shown == ["4", "7"]
    pool.submit(job(0), 0.0)
    pool.submit(job(1), 1.0)
    pool.kill(1)
    pool.turn()
    assert pool.shown == ["4", "7", "7"]
    pool.close()


def test_missing_ray_is_reported_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"--executor ray needs Ray: pip install 'fedecho\[ray\]'"):
        Execution(executor="ray")


@pytest.mark.parametrize("theirs", [None, "1"])
def test_rays_settings_are_made_while_it_starts_and_put_back(theirs: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install 'fedecho[ray]'")
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    if theirs is not None:
        monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", theirs)
    before = dict(os.environ)
    Execution(executor="ray", workers=1)
    assert dict(os.environ) == before
    with ray_settings():
        assert ENVIRONMENT.items() <= os.environ.items()
    assert dict(os.environ) == before


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "head:", "head:port", ":6379", "head:70000", "", 7])
def test_an_address_is_auto_or_host_and_port(address: Any) -> None:
    with pytest.raises(ValueError, match="--address must be auto or HOST:PORT"):
        check_address(address)


def test_an_unreachable_address_is_reported_at_once() -> None:
    with pytest.raises(ValueError, match=r"no Ray cluster at --address 127.0.0.1:9 .*: start one with `ray start --head"):
        check_reachable("127.0.0.1:9")
    for right in (None, "auto", "head:6379", "[::1]:6379"):
        check_address(right)
