"""MLflow. MLFLOW_TRACKING_URI says where (by default MLflow's own file here), MLFLOW_EXPERIMENT_NAME under which name."""

import os
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

        self._client: Any = MlflowClient()
        self._metric = Metric
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedecho")
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
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
