"""Feed mutated answers to the codec and the admission checks: no crash, and rejected answers change nothing.

    python -m benchmarks.fuzz_codec --num 100000

An answer is a good one with up to three mutations: bytes flipped, cut or made up, headers that lie, records and arrays that are
missing or of another kind, metrics of every type. What the codec cannot read is a ``ValueError`` or a ``TypeError``, which the
transport turns into a refusal; whatever passes goes to the server, whose state must stay as it was unless it accepts.
"""

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor, nn

from benchmarks.arguments import at_least_one
from fedecho.algorithms import FedBuff
from fedecho.core.layout import Layout
from fedecho.core.server import Server
from fedecho.core.types import ClientUpdate, Dispatch, GlobalModel, Lost, Refused
from fedecho.flower.codec import Codec
from fedecho.storage.checkpoint import encode

Parts = dict[str, dict[str, Any]]
HEADERS = [b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (3,), }", b"\x93NUMPY", b"", b"\x00" * 200]
HEADERS += [b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (999999999999,), }" + b" " * 60 + b"\n"]
ODD: list[Any] = [float("nan"), float("inf"), -1, 0, 2**62, 1e300, [1, 2], [0.5] * 9]


def _bytes(array: Array, change: Callable[[bytearray], Any]) -> Array:
    data = bytearray(array.data)
    change(data)
    return Array(dtype=array.dtype, shape=tuple(array.shape), stype=array.stype, data=bytes(data))


def mutate(parts: Parts, rng: random.Random) -> str:
    """One change in place; its name."""
    arrays, metrics = parts["arrays"], parts["metrics"]
    name = rng.choice(list(arrays)) if arrays else None
    kinds: dict[str, Callable[[], Any]] = {
        "no metrics": lambda: parts.pop("metrics"),
        "odd metric": lambda: metrics.update({rng.choice(["num-examples", "num-steps", "loss"]): rng.choice(ODD)}),
        "many metrics": lambda: metrics.update({f"m{k}": 1.0 for k in range(200)}),
        "long name": lambda: metrics.update({"x" * 5000: 1.0}),
    }
    if name is not None:
        array: Array = arrays[name]
        kinds |= {
            "bytes flipped": lambda: arrays.update({name: _bytes(array, lambda data: _flip(data, rng))}),
            "header": lambda: arrays.update({name: _bytes(array, lambda data: _header(data, rng))}),
            "cut": lambda: arrays.update({name: _bytes(array, lambda data: _cut(data, rng))}),
            "grown": lambda: arrays.update({name: _bytes(array, lambda data: data.extend(rng.randbytes(rng.randrange(99))))}),
            "made up": lambda: arrays.update({name: _labelled("numpy.ndarray", rng.randbytes(300))}),
            "other stype": lambda: arrays.update({name: _labelled("pickle", array.data)}),
            "missing": lambda: arrays.pop(name),
            "renamed": lambda: arrays.update({name + "!": arrays.pop(name)}),
            "not finite": lambda: arrays.update({name: Array(_odd_values(array, rng))}),
            "float64": lambda: arrays.update({name: Array(array.numpy().astype("float64"))}),
            "flat": lambda: arrays.update({name: Array(array.numpy().reshape(-1))}),
        }
    chosen = rng.choice(list(kinds))
    with suppress(Exception):  # an earlier mutation has left nothing that numpy could read
        kinds[chosen]()
    return chosen


def _labelled(stype: str, data: bytes) -> Array:
    return Array(dtype="float32", shape=(3,), stype=stype, data=data)


def _cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def _flip(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] = rng.randrange(256)


def _header(data: bytearray, rng: random.Random) -> None:
    head = rng.choice(HEADERS)
    data[: rng.choice([len(head), 128])] = head


def _odd_values(array: Array, rng: random.Random) -> Any:
    values = array.numpy().copy()
    values.reshape(-1)[rng.randrange(values.size)] = rng.choice([float("nan"), float("inf"), 1e38])
    return values


def bits(server: Server[Any]) -> Any:
    tensors: dict[str, Tensor] = {}
    tree = encode({"state": server.state, "model": server.model}, tensors)
    return repr(tree), [tensor.numpy().tobytes() for tensor in tensors.values()]


def answered(codec: Codec, dispatch: Dispatch, rng: random.Random) -> tuple[ClientUpdate | Refused, list[str]]:
    """What the transport hands to the server for a mutated answer."""
    weights = dispatch.model.weights.clone()
    weights.params.add_(0.01 * rng.random())
    update = ClientUpdate(dispatch.client, dispatch.model.version, weights.params, weights.buffers, 7, 3, metrics={"loss": 0.5})
    content = codec.answer(update, weights)
    parts: Parts = {"arrays": dict(content.array_records["arrays"]), "metrics": dict(content.metric_records["metrics"])}
    names = [mutate(parts, rng) for _ in range(rng.randint(0, 3)) if len(parts) == 2]
    try:
        records: dict[str, Any] = {"arrays": ArrayRecord(parts["arrays"])}
        if "metrics" in parts:
            records["metrics"] = MetricRecord(parts["metrics"])
        return codec.read_answer(RecordDict(records | {"more": ConfigRecord({"a": 1})}), dispatch), names
    except (ValueError, TypeError) as error:
        return Refused(dispatch.client, f"the answer cannot be read: {error}"), names


def fuzz(num: int, seed: int) -> tuple[Counter[str], Counter[str], list[str]]:
    """(what became of them, reasons of refusals, failures)."""
    rng, module = random.Random(seed), nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))  # noqa: S311
    layout = Layout.of(module)
    server = Server(
        algorithm=FedBuff(buffer_size=4), model=GlobalModel(0, layout.pack(module)), num_clients=8, concurrency=4, seed=0
    )
    codec, waiting, failures = Codec(layout), {each.client: each for each in server.refill()}, list[str]()
    statuses: Counter[str] = Counter()
    for number in range(num):
        dispatch = waiting.pop(rng.choice(list(waiting)))
        names: list[str] = []
        before = bits(server)
        try:
            message, names = answered(codec, dispatch, rng)
            receipt = server.receive(message)
            statuses[receipt.status] += 1
            if receipt.status == "accepted":
                assert isinstance(message, ClientUpdate)
                assert message.delta.isfinite().all()
                assert message.delta.shape == server.model.weights.params.shape
            elif bits(server) != before:
                failures.append(f"{number}: {names} changed the state")
        except Exception as error:
            failures.append(f"{number}: {names}: {type(error).__name__}: {error}")
            server.receive(Lost(dispatch.client, "the fuzz failed"))
        if server.ready:
            server.advance()
        waiting |= {each.client: each for each in server.refill()}
    return statuses, server.reasons, failures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num", type=at_least_one, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    statuses, reasons, failures = fuzz(options.num, options.seed)
    print(
        f"{options.num} answers in {time.perf_counter() - began:.0f} s: {dict(statuses)}; refused for {dict(reasons.most_common())}"
    )
    for failure in failures[:20]:
        print(failure)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
