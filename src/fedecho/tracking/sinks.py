"""Tracking sinks: the protocol, and TensorBoard, Weights & Biases and MLflow."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from fedecho.storage.files import make_private


class Sink(Protocol):
    """Receives the metrics of each version. Implement it for your own tracking tool."""

    def log(self, version: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def flat(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """``{"local": {"epochs": 2}}`` as ``{"local.epochs": 2}``."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return found


class TensorBoardSink:
    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        make_private(folder)
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), flush_secs=10)
        table = "\n".join(f"| {key} | {value} |" for key, value in flat(config).items())
        self._writer.add_text("config", f"| setting | value |\n|---|---|\n{table}", 0)

    def log(self, version: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, version)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        make_private(folder)
        self._run: Any = wandb.init(dir=str(folder), name=folder.name, config=flat(config), reinit="create_new")

    def log(self, version: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=version)

    def close(self) -> None:
        self._run.finish()


MOST_PARAMS = 100
"""MLflow's limit for one request."""


class MlflowSink:
    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client: Any = MlflowClient()
        self._metric = Metric
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedecho")
        existing = self._client.get_experiment_by_name(name)
        experiment = existing.experiment_id if existing else self._client.create_experiment(name)
        self._run_id = self._client.create_run(experiment, run_name=folder.name).info.run_id
        params = [Param(key, str(value)) for key, value in flat(config).items()][:MOST_PARAMS]
        self._client.log_batch(self._run_id, params=params)

    def log(self, version: int, numbers: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        self._client.log_batch(
            self._run_id, metrics=[self._metric(name, value, now, version) for name, value in numbers.items()]
        )

    def close(self) -> None:
        self._client.set_terminated(self._run_id)
