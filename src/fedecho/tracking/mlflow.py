"""MLflow. MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say where; by default it is a place of its own in this folder."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedecho.tracking.sink import flat

MOST_PARAMS = 100
"""As many as MLflow takes at once."""


class MlflowSink:
    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param
        from mlflow.tracking.fluent import _get_experiment_id

        self._client: Any = MlflowClient()
        self._metric = Metric
        self._run_id = self._client.create_run(_get_experiment_id(), run_name=folder.name).info.run_id
        params = [Param(key, str(value)) for key, value in flat(config).items()][:MOST_PARAMS]
        self._client.log_batch(self._run_id, params=params)

    def log(self, version: int, numbers: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        self._client.log_batch(
            self._run_id, metrics=[self._metric(name, value, now, version) for name, value in numbers.items()]
        )

    def close(self) -> None:
        self._client.set_terminated(self._run_id)
