"""Feed mutated updates to every algorithm: no crash, rejected updates change nothing, and nothing invalid is accepted.

    python -m benchmarks.fuzz --num 100000
    python -m benchmarks.fuzz --num 2000 --seed 7       the small one that the tests run

Every update is a good one with up to three mutations (``benchmarks/mutations.py``). After each one: what was refused has
changed no bit of the algorithm's state and of any model alive; what was accepted is finite and of the right sizes;
the record takes a line of either. A failure names its mutations; the same seed finds it again. A finite update can still be
too large for the algorithm behind the border (first reports are bounded by the scale of the model alone): such models are counted.
"""

import argparse
import sys
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from benchmarks.arguments import at_least_one
from benchmarks.mutations import MUTATIONS
from fedecho import ALGORITHMS, Experiment, load
from fedecho.core.loop import Moment
from fedecho.core.randomness import below, uniform
from fedecho.core.server import Receipt, Server
from fedecho.core.types import ClientUpdate, GlobalModel, Joined, Left, Lost
from fedecho.runs.build import assembled
from fedecho.runs.record import Record
from fedecho.storage.checkpoint import encode

NUM_CLIENTS, MOST_MUTATIONS = 8, 3
NAMES = list(MUTATIONS)
SETTINGS = [f"task.num_clients={NUM_CLIENTS}", "concurrency=3", "task.width=1", "task.num_unlabeled=10"]


class OddError(AssertionError):
    """Something was let in, or changed, that must not."""


class NotFiniteError(Exception):
    """A model made of updates that were all finite is not: one of them was too large for the algorithm."""


@dataclass
class Found:
    """What became of the updates, and what went wrong: its first place and how often."""

    seen: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    diverged: list[str] = field(default_factory=list)

    def fail(self, error: BaseException, where: str) -> None:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        told = str(error).splitlines()[0][:100] if str(error) else ""
        what = f"{type(error).__name__}: {told} ({frame.filename.rpartition('fedecho/')[2]}:{frame.lineno})"
        self.failures[what] += 1
        self.examples.setdefault(what, where)


def server_of(experiment: Experiment) -> Server[Any]:
    with assembled(experiment) as simulation:
        return simulation.server


def bits(value: Any) -> tuple[Any, ...]:
    tensors: dict[str, Tensor] = {}
    tree = encode(value, tensors)
    return repr(tree), [(tensor.dtype, tensor.shape, tensor.numpy().tobytes()) for tensor in tensors.values()]


def models_of(server: Server[Any]) -> dict[int, tuple[Any, ...]]:
    """Every bit of all models alive."""
    return {model.version: bits(model) for model in (*server.versions.models.values(), server.model)}


def good_update(server: Server[Any], seed: int, number: int) -> tuple[ClientUpdate, GlobalModel]:
    """What the server waits for from one of its clients."""
    client = list(server.open)[below(len(server.open), seed, "client", number)]
    model = server.versions.models[server.open[client].base_version]
    params, buffers = model.weights.params, model.weights.buffers
    delta = torch.full_like(params, 0.01 * (0.5 + uniform(seed, "size", number)))
    return ClientUpdate(client, model.version, delta, buffers.clone(), 7, 3, delta / 10, {"loss": 0.5}), model


def mutated(update: ClientUpdate, model: GlobalModel, seed: int, number: int) -> tuple[ClientUpdate, list[str]]:
    chosen = []
    for place in range(below(MOST_MUTATIONS + 1, seed, "mutations", number)):
        name = NAMES[below(len(NAMES), seed, "mutation", number, place)]
        try:
            update = MUTATIONS[name](update, model, below(10**6, seed, "draw", number, place))
            chosen.append(name)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            pass  # one mutation has left nothing that the next one could work on
    return update, chosen


def check_accepted(update: ClientUpdate, model: GlobalModel) -> None:
    tensors = {"delta": model.weights.params, "buffers": model.weights.buffers, "correction": model.weights.params}
    for name, like in tensors.items():
        tensor = getattr(update, name)
        if tensor is None and name == "correction":
            continue
        if not isinstance(tensor, Tensor) or tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise OddError(f"{name} was accepted and does not fit")
        if tensor.layout != like.layout or tensor.device != like.device or not tensor.isfinite().all():
            raise OddError(f"{name} was accepted and is of another kind or not finite")
    kinds = {"client": (int,), "base_version": (int,), "num_examples": (int, float), "num_steps": (int,)}
    for name, allowed in kinds.items():
        if type(getattr(update, name)) not in allowed:
            raise OddError(f"{name} was accepted as a {type(getattr(update, name)).__name__}")
    if not all(type(key) is str and isfinite(value) for key, value in update.metrics.items()):
        raise OddError("metrics were accepted that are no finite numbers")


def check_slots(server: Server[Any], before: dict[int, Any], receipt: Receipt) -> None:
    """Only the slot of the dispatch that was answered is free again; nobody is idle and at work, or known twice."""
    gone = [work.number for client, work in before.items() if client not in server.open]
    if gone != ([receipt.dispatch] if receipt.dispatch >= 0 else []):
        raise OddError(f"dispatches {gone} ended, and the receipt says {receipt.dispatch}")
    idle = server.idle.ordered()
    if len(set(idle)) != len(idle) or set(idle) & set(server.open) or not {type(client) for client in idle} <= {int}:
        raise OddError(f"idle clients {idle} beside {list(server.open)} at work")


def push(server: Server[Any], record: Record, update: ClientUpdate, model: GlobalModel) -> Receipt:
    """One update in, everything checked. What is refused changes nothing but its slot."""
    state, models, open_before = bits(server.state), models_of(server), dict(server.open)
    receipt = server.receive(update)
    left = models_of(server)  # one that nobody trains from any more is forgotten
    if left != {version: models[version] for version in left}:
        raise OddError("a published model has changed")
    if receipt.status == "accepted":
        check_accepted(update, model)
    elif receipt.status != "rejected":
        raise OddError(f"an update was {receipt.status}")
    elif bits(server.state) != state:
        raise OddError(f"a refused update has changed the state: {receipt.code}")
    elif len(receipt.reason) > 1000 or not receipt.code:
        raise OddError(f"a reason of thousands of characters, counted as {receipt.code!r}")
    check_slots(server, open_before, receipt)
    step = None
    if server.ready:
        step = server.advance()
        if not all(bool(tensor.isfinite().all()) for tensor in (step.model.weights.params, step.model.weights.buffers)):
            raise NotFiniteError
    record.moment(Moment(0.0, receipt, step))
    return receipt


def disturb(server: Server[Any], seed: int, number: int) -> None:
    """Clients come, go and are lost meanwhile, also ones that nobody knows."""
    kind, client = below(60, seed, "disturb", number), below(NUM_CLIENTS + 2, seed, "disturbed", number) - 1
    if kind < 3:
        server.receive((Joined(client), Left(client), Lost(client, "lost"))[kind])


def fuzz(num: int, seed: int) -> Found:
    found = Found()
    experiments = {name: load("digits", algorithm=name, versions=10**6, settings=SETTINGS) for name in ALGORITHMS}
    servers = {name: server_of(experiment) for name, experiment in experiments.items()}
    record = Record.in_memory(lambda client: "short")
    for number in range(num):
        name = list(servers)[below(len(servers), seed, "algorithm", number)]
        server = servers[name]
        chosen: list[str] = []
        try:
            disturb(server, seed, number)
            server.refill()
            if not server.open:  # all have left
                servers[name] = server_of(experiments[name])
                continue
            update, chosen = mutated(*good_update(server, seed, number), seed, number)
            receipt = push(server, record, update, server.model)
            if number % 100 == 0:
                encode(server.snapshot(), {})  # a checkpoint takes whatever state there is
            found.seen[receipt.status] += 1
            found.codes[receipt.code] += receipt.status == "rejected"
        except NotFiniteError:
            found.diverged.append(f"number {number}, {name}")
            servers[name] = server_of(experiments[name])
        except Exception as error:
            found.fail(error, f"number {number}, {name}: {'; '.join(chosen) or 'a good update'}")
            servers[name] = server_of(experiments[name])
        if number % 1000 == 0:
            record = Record.in_memory(lambda client: "short")
    return found


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=at_least_one, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.perf_counter()
    found = fuzz(options.num, options.seed)
    told = ", ".join(f"{count:,} {status}" for status, count in found.seen.most_common())
    print(f"fuzz: {options.num:,} updates, {len(MUTATIONS)} mutations, {len(ALGORITHMS)} algorithms: {told}", end="")
    print(f", {time.perf_counter() - began:.0f} s")
    print(f"  refused for: {dict(+found.codes)}")
    print(f"  models that came out not finite, all of their updates being so: {len(found.diverged)} {found.diverged[:3] or ''}")
    print(f"  failures: {found.failures.total()} of {len(found.failures)} kinds")
    for what, count in found.failures.most_common():
        print(f"    {count:6} {what}\n           first: {found.examples[what]}")
    sys.exit(bool(found.failures))


if __name__ == "__main__":
    main()
