"""``AsyncStrategy``: a user's own Flower app becomes asynchronous by three lines. Its client needs no change."""

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
from fedecho.core.algorithm import Algorithm, check_algorithm, demands
from fedecho.core.server import Server
from fedecho.core.task import defines
from fedecho.core.types import GlobalModel
from fedecho.distill.student import Student
from fedecho.flower.grid import Waiting
from fedecho.flower.journal import Identity, Journal
from fedecho.flower.run_log import History
from fedecho.flower.server_app import federate
from fedecho.flower.transport import GridTransport
from fedecho.flower.user_model import UserModel
from fedecho.flower.wire import PROXIMAL
from fedecho.runs.config import to_config
from fedecho.runs.experiment import attributes, check_clients, described, with_seed
from fedecho.runs.identity import name_of
from fedecho.runs.methods import by_examples

PLAIN = (str, int, float, bool, dict, list, type(None))


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
    weighted: bool = True
    """A mean counts clients by their ``num-examples``, as Flower's own do. False: as ``algorithm`` says.

    FedAvg, FedBuff and FADAS take a mean, alone or inside FedEcho. Others, and those with a robust ``combine``, stay as they are.
    """
    seed: int = 0
    module: nn.Module | None = None
    unlabeled: Tensor | None = None
    folder: str | Path | None = None
    admission: Admission = field(default_factory=Admission)
    waiting: Waiting = field(default_factory=Waiting)
    """Its ``timeout_s`` is ``start``'s ``timeout``."""
    other_software: bool = False
    """Go on with a run in ``folder`` that other software began; its record will say so."""
    ask_partition: bool = False
    """Ask nodes for their ``partition-id`` (the ClientApp must answer queries, as ours does), or number them as they come."""

    def __post_init__(self) -> None:
        check_algorithm(self.algorithm)
        object.__setattr__(self, "algorithm", with_seed(self.algorithm, self.seed))
        if self.waiting.timeout_s != Waiting().timeout_s:
            told = self.waiting.timeout_s
            raise ValueError(f"give start(timeout={told}) in place of Waiting(timeout_s={told}): as in Flower, it is start's")
        check_clients(self.algorithm, self.num_clients, self._concurrency)
        if demands(self.algorithm).control_variates:
            raise ValueError(
                f"{type(self.algorithm).__name__}'s clients keep control variates, which a plain ClientApp does not: "
                "use make_server_app and make_client_app of fedecho.flower"
            )
        if defines(self.algorithm, "attached") and (self.module is None or self.unlabeled is None):
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
        timeout: float | None = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run ``num_rounds`` versions. Evaluation is the server's (``evaluate_fn``): clients never stop for one.

        ``timeout`` is the longest deadline of an answer in seconds; None: there is none. With ``num_rounds=0`` the initial model is
        evaluated and returned.
        """
        if type(num_rounds) is not int or num_rounds < 0:
            raise ValueError(f"num_rounds must be a whole number of at least 0, got {num_rounds!r}")
        if evaluate_config:
            raise ValueError(
                "evaluate_config is for evaluation on clients, which an asynchronous run does not do: use evaluate_fn"
            )
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
                f"num_rounds is 0: the initial model is {'evaluated' if evaluate_fn else 'returned'}, and nothing is run or saved"
            )
            evaluate(GlobalModel(0, model.weights))
            result.arrays = codec.arrays(model.weights)
            return result
        server = self._server(model)
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
            header=self._parts(train_config),
            other_software=self.other_software,
            folder_setting="folder",
        )
        folder = None if self.folder is None else Path(self.folder)
        journal = Journal(identity, server, transport, model.layout, folder, _say, model.full_state.named)
        history = History(result)
        try:
            history.recall(journal.past())
            federate(
                server,
                transport,
                journal,
                num_versions=num_rounds,
                evaluate=evaluate,
                evaluate_first=True,
                watch=history.see,
                say=_say,
            )
            result.arrays = codec.arrays(server.model.weights) if journal.finished is None else model.saved(journal.model())
        finally:
            journal.close()
        return result

    def _described(self) -> dict[str, Any]:
        """What a run that goes on must have in common with the one before; a user's own method by its type alone."""
        method = to_config(self._method) if is_dataclass(self.algorithm) else {"name": type(self.algorithm).__name__}
        plain = {key: value if isinstance(value, PLAIN) else repr(type(value)) for key, value in method.items()}
        told = {"num_clients": self.num_clients, "concurrency": self._concurrency, "seed": self.seed}
        return {"strategy": "AsyncStrategy", "algorithm": plain, "admission": to_config(self.admission), **told}

    def _parts(self, train_config: ConfigRecord | None) -> dict[str, Any]:
        """What a report tells runs apart by, beside their configuration."""
        parts = {"algorithm": self.algorithm, "train_config": dict(train_config or {})}
        return {"parts": described(parts), "attributes": attributes(self.algorithm, "algorithm")}

    def _config(self, train_config: ConfigRecord | None) -> dict[str, Any]:
        """A proximal term is asked of clients under the name that Flower's FedProx gives it."""
        asked = demands(self.algorithm).proximal
        return {**(train_config or {}), **({PROXIMAL: asked} if asked else {})}

    @property
    def _method(self) -> Any:
        return by_examples(self.algorithm) if self.weighted else self.algorithm

    def _server(self, model: UserModel) -> Server[Any]:
        algorithm = self._method
        if self.module is not None and self.unlabeled is not None and defines(algorithm, "attached"):
            rows = self.unlabeled
            algorithm = algorithm.attached(
                Student(model.bound(self.module), lambda module, some: module(rows[some]), len(rows))
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


def _timeout(timeout: float | None) -> float | None:
    if timeout is None or timeout == inf:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not (isfinite(timeout) and timeout > 0):
        raise ValueError(f"timeout must be a number of seconds above 0, or None for no deadline, got {timeout!r}")
    return float(timeout)


def _say(text: str) -> None:
    log(INFO, "%s", text)
