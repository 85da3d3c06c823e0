"""Store GPU benchmark results with the GPU, torch version and commit they were measured on."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fedecho.paper.filling import commit


def keep(path: Path | None, rows: Iterable[Any]) -> None:
    """Rows are dataclasses. Nothing is written where no file was asked for."""
    if path is None:
        return
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    found = {"machine": machine, "torch": torch.__version__, "commit": commit(), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(found, indent=1) + "\n")
