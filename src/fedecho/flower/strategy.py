"""``AsyncStrategy``: makes an existing Flower app asynchronous in three lines, without changes to its client."""

from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass
from logging import INFO
from math import inf, isfinite
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import Tensor, nn

from fedecho.core.admission import Admission
from fedecho.core.algorithm import Algorithm, buffer_size_of, check_algorithm, demands
from fedecho.core.server import Server
from fedecho.core.types import GlobalModel
from fedecho.distill.student import Student, distils
from fedecho.flower.deployed_run import DeployedRun
from fedecho.flower.grid import Waiting
from fedecho.flower.run_log import History
from fedecho.flower.transport import GridTransport
from fedecho.flower.user_model import UserModel
from fedecho.flower.wire import PROXIMAL
from fedecho.runs.config import to_config
from fedecho.runs.experiment import attributes, check_clients, describe, with_seed
from fedecho.runs.identity import Identity, name_of
from fedecho.runs.methods import by_examples

PLAIN = (str, int, float, bool, dict, list, type(None))


@dataclass(frozen=True, kw_only=True)
class AsyncStrategy:
    """Runs any algorithm of this package with the ``start`` method of Flower's strategies. A round is a version: M arrivals.

    FedEcho needs ``module`` and ``unlabeled`` rows to distill with. With ``folder`` the run is recorded and checkpointed there,
    and resumes when it is submitted again.
    """

    algorithm: Algorithm[Any]
    num_clients: int
    concurrency: int | None = None
    """The number of clients that train at once; by default all, or the buffer size of a synchronous method."""
    weighted: bool = True
    """Weight clients by ``num-examples``, as Flower's strategies do. False: use ``algorithm`` as given.

    Applies to FedAvg, FedBuff and FADAS, alone or inside FedEcho. Other methods, and those with a robust ``combine``, stay
    as they are.
    """
    seed: int = 0
    module: nn.Module | None = None
    unlabeled: Tensor | None = None
    folder: str | Path | None = None
    admission: Admission = field(default_factory=Admission)
    waiting: Waiting = field(default_factory=Waiting)
    """``timeout_s`` must be left alone: ``start`` sets it from its ``timeout``."""
    other_software: bool = False
    """Resume a run in ``folder`` that was started with other software versions; the record notes the change."""
    ask_partition: bool = False
    """Query nodes for their ``partition-id`` (the ClientApp must answer queries, as ours does) instead of numbering them."""

    def __post_init__(self) -> None:
        check_algorithm(self.algorithm)
        object.__setattr__(self, "algorithm", with_seed(self.algorithm, self.seed))
        if self.waiting.timeout_s != Waiting().timeout_s:
            timeout = self.waiting.timeout_s
            raise ValueError(f"Waiting(timeout_s={timeout}) has no effect here: pass start(timeout={timeout}), as in Flower")
        check_clients(self.algorithm, self.num_clients, self._concurrency)
        if demands(self.algorithm).control_variates:
            raise ValueError(
                f"{type(self.algorithm).__name__} needs clients that keep control variates, which a plain ClientApp does not: "
                "use make_server_app and make_client_app of fedecho.flower"
            )
        if distils(self.algorithm) and (self.module is None or self.unlabeled is None):
            raise ValueError(f"{type(self.algorithm).__name__} needs AsyncStrategy(module=..., unlabeled=...) to distill with")

    @property
    def _concurrency(self) -> int:
        if self.concurrency is not None:
            return self.concurrency
        buffer_size = buffer_size_of(self.algorithm)
        is_synchronous = demands(self.algorithm).synchronous
        return int(buffer_size) if buffer_size is not None and is_synchronous else self.num_clients

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float | None = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run ``num_rounds`` versions. Only the server evaluates (``evaluate_fn``), so that clients never wait.

        ``timeout`` is the longest deadline of an answer in seconds; None means no deadline. With ``num_rounds=0`` the initial
        model is evaluated and returned.
        """
        _check_start(num_rounds, evaluate_config)
        waiting = Waiting(**{**vars(self.waiting), "timeout_s": _timeout(timeout)})
        model = UserModel.of(initial_arrays, self.module)
        codec = model.codec(self._config(train_config))
        result = Result()

        def evaluate(published: GlobalModel) -> dict[str, Any] | None:
            scores = None if evaluate_fn is None else evaluate_fn(published.version, codec.arrays(published.weights))
            if scores is not None:
                result.evaluate_metrics_serverapp[published.version] = scores
            return None if scores is None else dict(scores)

        if num_rounds == 0:
            _say(
                f"num_rounds is 0: the initial model is {'evaluated' if evaluate_fn else 'returned'}; nothing is trained or saved"
            )
            evaluate(GlobalModel(0, model.weights))
            result.arrays = codec.arrays(model.weights)
            return result
        server = self._server(model)
        transport = GridTransport(
            grid=grid, codec=codec, num_clients=self.num_clients, waiting=waiting, ask=self.ask_partition, say=_say
        )
        run = DeployedRun(
            self._identity(num_rounds, train_config),
            server,
            transport,
            None if self.folder is None else Path(self.folder),
            num_params=model.layout.num_params,
            named=model.full_state.named,
            say=_say,
        )
        history = History(result)
        with run.opened(other_software=self.other_software, folder_setting="folder"):
            history.recall(run.past())
            run.complete(evaluate=evaluate, evaluate_first=True, watch=history.see)
            result.arrays = codec.arrays(server.model.weights) if run.finished is None else model.saved(run.saved_model())
        return result

    def _identity(self, num_rounds: int, train_config: ConfigRecord | None) -> Identity:
        name = name_of(self.algorithm)
        return Identity(
            name=name,
            algorithm=name,
            seed=self.seed,
            num_versions=num_rounds,
            config=self._described(),
            parts=self._parts(train_config),
        )

    def _described(self) -> dict[str, Any]:
        """The configuration that a resumed run must match. A custom method is identified by its type alone."""
        method = to_config(self._method) if is_dataclass(self.algorithm) else {"name": type(self.algorithm).__name__}
        plain = {key: value if isinstance(value, PLAIN) else repr(type(value)) for key, value in method.items()}
        numbers = {"num_clients": self.num_clients, "concurrency": self._concurrency, "seed": self.seed}
        return {"strategy": "AsyncStrategy", "algorithm": plain, "admission": to_config(self.admission), **numbers}

    def _parts(self, train_config: ConfigRecord | None) -> dict[str, Any]:
        """Header fields by which a report distinguishes runs, in addition to their configuration."""
        parts = {"algorithm": self.algorithm, "train_config": dict(train_config or {})}
        return {"parts": describe(parts), "attributes": attributes(self.algorithm, "algorithm")}

    def _config(self, train_config: ConfigRecord | None) -> dict[str, Any]:
        """The configuration sent to clients, with a proximal term under the key of Flower's FedProx."""
        proximal = demands(self.algorithm).proximal
        return {**(train_config or {}), **({PROXIMAL: proximal} if proximal else {})}

    @property
    def _method(self) -> Algorithm[Any]:
        return by_examples(self.algorithm) if self.weighted else self.algorithm

    def _server(self, model: UserModel) -> Server[Any]:
        algorithm = self._method
        if self.module is not None and self.unlabeled is not None and distils(algorithm):
            rows = self.unlabeled
            algorithm = algorithm.attached(
                Student(model.bound(self.module), lambda module, indices: module(rows[indices]), len(rows))
            )
        return Server(
            algorithm=algorithm,
            model=GlobalModel(0, model.weights),
            num_clients=self.num_clients,
            concurrency=self._concurrency,
            seed=self.seed,
            admission=self.admission,
            variances=model.layout.variances(),
        )


def _check_start(num_rounds: int, evaluate_config: ConfigRecord | None) -> None:
    if type(num_rounds) is not int or num_rounds < 0:
        raise ValueError(f"num_rounds must be a whole number of at least 0, got {num_rounds!r}")
    if evaluate_config:
        raise ValueError(
            "evaluate_config is for evaluation on clients, which an asynchronous run does not support: use evaluate_fn"
        )


def _timeout(timeout: float | None) -> float | None:
    if timeout is None or timeout == inf:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not (isfinite(timeout) and timeout > 0):
        raise ValueError(f"timeout must be a number of seconds above 0, or None for no deadline, got {timeout!r}")
    return float(timeout)


def _say(text: str) -> None:
    log(INFO, "%s", text)
