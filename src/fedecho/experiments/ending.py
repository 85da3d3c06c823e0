"""The end of a run, simulated or deployed: its summary, its model, and no checkpoints any more."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from fedecho.algorithms.fedecho import Echo
from fedecho.core.checkpoint import remove_checkpoints, write_atomically
from fedecho.core.server import Server
from fedecho.experiments.folder import MODEL
from fedecho.experiments.identity import model_digest
from fedecho.experiments.record import Line, Record
from fedecho.experiments.summary import Summary, accuracies, last_scores


def summary_of(server: Server[Any], evaluations: Sequence[Line], **known: Any) -> Summary:
    """What the server and the evaluations tell; ``known`` is the rest, by the names of the summary's fields."""
    bank = server.state.bank if isinstance(server.state, Echo) else None
    return Summary(
        num_versions=server.model.version,
        accepted=server.counts["accepted"],
        rejected=server.counts["rejected"],
        lost=server.counts["lost"],
        reasons=dict(server.reasons),
        peak_versions_alive=server.versions.peak_alive,
        bank_bytes=0 if bank is None else bank.num_bytes,
        model_sha256=model_digest(server.model.weights),
        scores=last_scores(evaluations),
        **accuracies(evaluations),
        **known,
    )


def write_end(folder: Path, record: Record, named: Mapping[str, Tensor], summary: Summary) -> None:
    """The summary last but for the checkpoints: a run that has one is finished."""
    record.sync()
    # One entry: safetensors writes several in an order that changes from process to process.
    write_atomically(folder / MODEL, save(dict(named), {"format": "pt"}))
    summary.write(folder)
    remove_checkpoints(folder)
