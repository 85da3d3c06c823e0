"""TensorBoard: ``tensorboard --logdir runs``. The event file lies in the run's own folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedecho.core.disk import make_private
from fedecho.tracking.sink import flat


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
