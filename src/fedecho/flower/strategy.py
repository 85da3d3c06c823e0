"""``AsyncStrategy``: a user's own Flower app becomes asynchronous by three lines. Its client needs no change."""

from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass
from logging import INFO
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import Tensor, nn

from fedecho.core.admission import Admission
from fedecho.core.algorithm import Algorithm, demands
from fedecho.core.drive import Moment
from fedecho.core.layout import Layout
from fedecho.core.server import Server
from fedecho.core.types import GlobalModel
from fedecho.distill.student import Student
from fedecho.experiments.config import to_config
from fedecho.experiments.experiment import check_clients, with_seed
from fedecho.experiments.identity import name_of
from fedecho.experiments.state import RunState
from fedecho.flower.codec import Codec
from fedecho.flower.federate import federate
from fedecho.flower.journal import Identity, Journal
from fedecho.flower.keys import PROXIMAL
from fedecho.flower.npy import shape_of, to_tensor
from fedecho.flower.transport import GridTransport
from fedecho.flower.waiting import Waiting

PLAIN = (str, int, float, bool, dict, list, type(None))
STATISTICS = ("running_mean", "running_var")
"""What is averaged by value and never optimised, by the names that torch gives it; a ``module`` says it exactly."""


@dataclass(frozen=True, kw_only=True)
class AsyncStrategy:
    """Any of our algorithms with ``start``, in the shape of Flower's own strategies. A round is a version: M arrivals.

    FedEcho needs ``module`` and ``unlabeled`` rows for it. With ``folder`` the run is recorded there, checkpointed at every
    version, and goes on when it is submitted again.
    """

    algorithm: Algorithm[Any]
    num_clients: int
    concurrency: int | None = None
    """How many clients work at once; by default all, or as many as a synchronous method's buffer holds."""
    seed: int = 0
    module: nn.Module | None = None
    unlabeled: Tensor | None = None
    folder: str | Path | None = None
    admission: Admission = field(default_factory=Admission)
    waiting: Waiting = field(default_factory=Waiting)
    other_software: bool = False
    """Go on with a run in ``folder`` that other software began; its record will say so."""
    ask_partition: bool = False
    """Ask nodes for their ``partition-id`` (the ClientApp must answer queries, as ours does), or number them as they come."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "algorithm", with_seed(self.algorithm, self.seed))
        check_clients(self.algorithm, self.num_clients, self._concurrency)
        if demands(self.algorithm).control_variates:
            raise ValueError(
                f"{type(self.algorithm).__name__}'s clients keep control variates, which a plain ClientApp does not: "
                "use make_server_app and make_client_app of fedecho.flower"
            )
        if hasattr(self.algorithm, "attached") and (self.module is None or self.unlabeled is None):
            raise ValueError(f"{type(self.algorithm).__name__} needs AsyncStrategy(module=..., unlabeled=...) to distil with")

    @property
    def _concurrency(self) -> int:
        if self.concurrency is not None:
            return self.concurrency
        told = getattr(self.algorithm, "buffer_size", None)
        return int(told) if told is not None and demands(self.algorithm).synchronous else self.num_clients

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run ``num_rounds`` versions. Evaluation is the server's (``evaluate_fn``): clients never stop for one."""
        if evaluate_config:
            raise ValueError(
                "evaluate_config is for evaluation on clients, which an asynchronous run does not do: use evaluate_fn"
            )
        layout, fixed = layout_of(initial_arrays, self.module)
        codec = Codec(layout, fixed, self._config(train_config))
        server = self._server(layout, initial_arrays)
        waiting = Waiting(**{**vars(self.waiting), "timeout_s": timeout})
        transport = GridTransport(
            grid=grid, codec=codec, num_clients=self.num_clients, waiting=waiting, ask=self.ask_partition, say=_say
        )
        name = name_of(self.algorithm)
        identity = Identity(
            name=name,
            algorithm=name,
            seed=self.seed,
            num_versions=num_rounds,
            config=self._described(),
            other_software=self.other_software,
        )
        journal = Journal(identity, server, transport, layout, None if self.folder is None else Path(self.folder), _say)
        result, state = Result(), RunState(num_rounds)
        gathered = _Gathered(result)

        def evaluate(model: GlobalModel) -> dict[str, Any] | None:
            scores = None if evaluate_fn is None else evaluate_fn(model.version, codec.arrays(model.weights))
            if scores is not None:
                result.evaluate_metrics_serverapp[model.version] = scores
            return None if scores is None else dict(scores)

        def watch(moment: Moment, scores: dict[str, Any] | None) -> None:
            state.see(moment, scores)
            gathered.see(moment)
            if moment.step is not None:
                _say(f"version {state.version}/{num_rounds}  {state.text}")

        if journal.resumed:
            _say(f"going on from version {server.model.version}: the Result holds what follows, {self.folder} the whole")
        else:
            evaluate(server.model)
        try:
            federate(server, transport, journal, num_versions=num_rounds, evaluate=evaluate, watch=watch)
        finally:
            journal.close()
        result.arrays = codec.arrays(server.model.weights)
        return result

    def _described(self) -> dict[str, Any]:
        """What a run that goes on must have in common with the one before; a user's own method by its type alone."""
        method = to_config(self.algorithm) if is_dataclass(self.algorithm) else {"name": type(self.algorithm).__name__}
        plain = {key: value if isinstance(value, PLAIN) else repr(type(value)) for key, value in method.items()}
        told = {"num_clients": self.num_clients, "concurrency": self._concurrency, "seed": self.seed}
        return {"strategy": "AsyncStrategy", "algorithm": plain, "admission": to_config(self.admission), **told}

    def _config(self, train_config: ConfigRecord | None) -> dict[str, Any]:
        """A proximal term is asked of clients under the name that Flower's FedProx gives it."""
        asked = demands(self.algorithm).proximal
        return {**(train_config or {}), **({PROXIMAL: asked} if asked else {})}

    def _server(self, layout: Layout, arrays: ArrayRecord) -> Server[Any]:
        algorithm: Any = self.algorithm
        if self.module is not None and self.unlabeled is not None and hasattr(algorithm, "attached"):
            rows = self.unlabeled
            algorithm = algorithm.attached(
                Student(layout.bind(self.module), lambda module, some: module(rows[some]), len(rows))
            )
        parts = (*layout.params, *layout.buffers)
        weights = layout.flatten({part.name: to_tensor(arrays[part.name], part.name, part.shape) for part in parts})
        return Server(
            algorithm=algorithm,
            model=GlobalModel(0, weights),
            num_clients=self.num_clients,
            concurrency=self._concurrency,
            seed=self.seed,
            admission=self.admission,
        )


class _Gathered:
    """The means of what clients reported for each version, with their staleness, as Flower's Result has them."""

    def __init__(self, result: Result) -> None:
        self._result = result
        self._seen: list[dict[str, float]] = []

    def see(self, moment: Moment) -> None:
        receipt = moment.receipt
        if receipt.status == "accepted":
            self._seen.append({**receipt.metrics, "staleness": float(receipt.staleness)})
        if moment.step is not None:
            shared = set.intersection(*(set(one) for one in self._seen)) if self._seen else set()
            means = {key: float(np.mean([one[key] for one in self._seen])) for key in sorted(shared)}
            self._result.train_metrics_clientapp[moment.step.model.version] = MetricRecord(dict(means))
            self._seen.clear()


def layout_of(arrays: ArrayRecord, module: nn.Module | None) -> tuple[Layout, dict[str, Array]]:
    """Where the arrays lie in flat vectors, and those that are no part of the arithmetic (counters) and travel unchanged."""
    shapes = {name: shape_of(array, name) for name, array in arrays.items()}
    odd = [f"{name!r} is {kind}" for name, (_, kind) in shapes.items() if kind.startswith("float") and kind != "float32"]
    if odd:
        raise ValueError(f"the arrays must be float32, but {odd[0]}: convert the model before it is sent")
    if module is not None:
        layout = Layout.of(module)
    else:
        tensors = {name: to_tensor(arrays[name], name, shape) for name, (shape, kind) in shapes.items() if kind == "float32"}
        running = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] in STATISTICS}
        layout = Layout.of_tensors({name: t for name, t in tensors.items() if name not in running}, running)
    known = {part.name for part in (*layout.params, *layout.buffers)}
    lacking = known - set(arrays)
    if lacking:
        raise ValueError(f"initial_arrays lack {min(lacking)!r}, which the module has")
    return layout, {name: array for name, array in arrays.items() if name not in known}


def _say(text: str) -> None:
    log(INFO, text)
