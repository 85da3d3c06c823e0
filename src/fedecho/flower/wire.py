"""The wire's string keys, and records framed over a local socket. Free of torch."""

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

ARRAYS, CONFIG, METRICS, CORRECTION, CONTROL = "arrays", "config", "metrics", "correction", "control"
ROUND, NUMBER, CLIENT, VERSION, SEED = "server-round", "dispatch", "client", "version", "seed"
NUM_EXAMPLES, NUM_STEPS, PARTITION, PROXIMAL = "num-examples", "num-steps", "partition-id", "proximal-mu"
"""``arrays``, ``config``, ``metrics``, ``server-round``, ``num-examples`` and ``proximal-mu`` are Flower's; the rest is ours."""


def introduction(partition: int) -> RecordDict:
    """A node's answer to the question who it is."""
    return RecordDict({CONFIG: ConfigRecord({PARTITION: partition})})


def read_introduction(content: RecordDict) -> int:
    return whole_number(record_of(content, CONFIG, content.config_records), PARTITION)


def partition_of(node_config: Mapping[str, Any]) -> int:
    """Which client a node is: ``--node-config 'partition-id=3'``."""
    if not isinstance(node_config.get(PARTITION), int):
        raise ValueError(
            f"this node does not know which client it is: start it with --node-config '{PARTITION}=0' (0, 1, 2, ...)"
        )
    return int(node_config[PARTITION])


def check_addressee(content: RecordDict, node_config: Mapping[str, Any]) -> None:
    """A node trains as the client it is, whatever a server says: its memory and its data are that client's."""
    told, mine = whole_number(record_of(content, CONFIG, content.config_records), CLIENT), partition_of(node_config)
    if told != mine:
        raise ValueError(f"the dispatch is for client {told}, but this node is client {mine}")


def record_of(content: RecordDict, key: str, records: Mapping[str, Any]) -> Any:
    if key not in records:
        raise ValueError(f"there is no record {key!r} among {', '.join(sorted(content)) or 'nothing'}")
    return records[key]


def only_record(content: RecordDict, key: str, records: Mapping[str, Any]) -> Any:
    """The record of this name or, as Flower's own strategies take it, the only one of its kind whatever its name."""
    return next(iter(records.values())) if key not in records and len(records) == 1 else record_of(content, key, records)


def number(record: Mapping[str, Any], key: str) -> float:
    """An int where it is whole: clients may count in floats."""
    value = record.get(key)
    if not isinstance(value, int | float):
        raise ValueError(f"{key!r} must be a number, got {value!r}")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def whole_number(record: Mapping[str, Any], key: str) -> int:
    value = record.get(key)
    if not isinstance(value, int):
        raise ValueError(f"{key!r} must be a whole number, got {value!r}")
    return value


LENGTH = struct.Struct(">Q")
MOST_HEADER = 64 << 20


def send_frame(link: socket.socket, note: Mapping[str, Any], *contents: RecordDict) -> None:
    """A note of plain values, then any number of records."""
    blobs: list[bytes] = []
    header = json.dumps({"note": dict(note), "contents": [_described(content, blobs) for content in contents]}).encode()
    link.sendall(LENGTH.pack(len(header)) + header)
    for blob in blobs:
        link.sendall(blob)


def receive_frame(link: socket.socket) -> tuple[dict[str, Any], list[RecordDict]]:
    """The next frame; ``ConnectionError`` if the other end is gone."""
    (size,) = LENGTH.unpack(_exactly(link, LENGTH.size))
    if size > MOST_HEADER:
        raise ValueError(f"a frame's header of {size} bytes is too long")
    header = json.loads(_exactly(link, size))
    return header["note"], [_rebuilt(content, link) for content in header["contents"]]


def _described(content: RecordDict, blobs: list[bytes]) -> dict[str, Any]:
    arrays = {}
    for name, record in content.array_records.items():
        arrays[name] = [[key, array.dtype, list(array.shape), array.stype, len(array.data)] for key, array in record.items()]
        blobs += [array.data for array in record.values()]
    metrics = {name: dict(record) for name, record in content.metric_records.items()}
    configs = {name: dict(record) for name, record in content.config_records.items()}
    return {"arrays": arrays, "metrics": metrics, "configs": configs}


def _rebuilt(told: Mapping[str, Any], link: socket.socket) -> RecordDict:
    content = RecordDict()
    for name, entries in told["arrays"].items():
        content[name] = ArrayRecord(
            {key: Array(dtype, tuple(shape), stype, _exactly(link, size)) for key, dtype, shape, stype, size in entries}
        )
    for name, values in told["metrics"].items():
        content[name] = MetricRecord(values)
    for name, values in told["configs"].items():
        content[name] = ConfigRecord(values)
    return content


def _exactly(link: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        count = link.recv_into(view[got:], min(size - got, 1 << 20))
        if count == 0:
            raise ConnectionError("the other end closed the connection")
        got += count
    return bytes(data)
