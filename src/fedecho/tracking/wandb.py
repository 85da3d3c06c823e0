"""Weights & Biases. Its own environment variables say who and where (WANDB_PROJECT, WANDB_MODE=offline, ...)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedecho.core.disk import make_private
from fedecho.tracking.sink import flat


class WandbSink:
    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        make_private(folder)
        self._run: Any = wandb.init(dir=str(folder), name=folder.name, config=flat(config), reinit="create_new")

    def log(self, version: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=version)

    def close(self) -> None:
        self._run.finish()
