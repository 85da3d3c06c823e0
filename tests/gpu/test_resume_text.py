"""A run on a GPU that is stopped goes on to the same bytes: what its checkpoint holds must be back on the GPU."""

from pathlib import Path
from typing import Any

import pytest
from small_cifar import ON_GPU
from tiny_text import write_world

from fedecho import load, resume, simulate

METHODS = {"fedbuff": ["algorithm.combine=median"], "ca2fl": [], "fedac": [], "fadas": [], "fedecho": []}
OPTIONS: dict[str, Any] = {"executor": "cuda", "precision": "fp32", "deterministic": True}


@pytest.mark.gpu
@ON_GPU[1]
@pytest.mark.parametrize("method", list(METHODS))
def test_stopped_in_the_middle_of_a_buffer(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDECHO_DATA", str(write_world(tmp_path / "world")))
    small = ["task.model=tiny-bert", "task.unlabeled_size=8", "task.num_clients=6", "eval_every=5", "local.num_local_steps=2"]
    one = load("mrpc", algorithm=method, versions=5, settings=[*small, *METHODS[method]])
    whole = simulate(one, out=tmp_path / "whole", **OPTIONS)
    seen = 0

    def stop(moment: object, scores: object) -> None:
        nonlocal seen
        seen += 1
        if seen == 8:  # clients that have reported are at work again, and two updates of the third version are there
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(one, out=tmp_path / "cut", checkpoint_s=0.0, watch=stop, **OPTIONS)
    assert resume(tmp_path / "cut").summary.model_sha256 == whole.summary.model_sha256
