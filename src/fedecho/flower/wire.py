"""String keys of messages, and framing of records on a local socket. Free of torch."""

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

ARRAYS, CONFIG, METRICS, CORRECTION, CONTROL = "arrays", "config", "metrics", "correction", "control"
ROUND, NUMBER, CLIENT, VERSION, SEED = "server-round", "dispatch", "client", "version", "seed"
NUM_EXAMPLES, NUM_STEPS, PARTITION, PROXIMAL = "num-examples", "num-steps", "partition-id", "proximal-mu"
"""``arrays``, ``config``, ``metrics``, ``server-round``, ``num-examples`` and ``proximal-mu`` are Flower's own keys."""


def introduction(partition: int) -> RecordDict:
    """A node's answer to a query: the client that it is."""
    return RecordDict({CONFIG: ConfigRecord({PARTITION: partition})})


def read_introduction(content: RecordDict) -> int:
    """The client in an introduction."""
    return whole_number(record_of(content, CONFIG, content.config_records), PARTITION)


def partition_of(node_config: Mapping[str, Any]) -> int:
    """The client that a node is, from ``--node-config 'partition-id=3'``."""
    if not isinstance(node_config.get(PARTITION), int):
        raise ValueError(
            f"{PARTITION} is missing from this node's configuration: start it with --node-config '{PARTITION}=0' (or 1, 2, ...)"
        )
    return int(node_config[PARTITION])


def check_addressee(content: RecordDict, node_config: Mapping[str, Any]) -> None:
    """Reject a dispatch for another client: this node holds the data and memory of its own client only."""
    client, own = whole_number(record_of(content, CONFIG, content.config_records), CLIENT), partition_of(node_config)
    if client != own:
        raise ValueError(f"the dispatch is for client {client}, but this node is client {own}")


def record_of(content: RecordDict, key: str, records: Mapping[str, Any]) -> Any:
    if key not in records:
        raise ValueError(f"record {key!r} is missing; the message has {', '.join(sorted(content)) or 'no records'}")
    return records[key]


def only_record(content: RecordDict, key: str, records: Mapping[str, Any]) -> Any:
    """The record of this name or, as in Flower's strategies, the only record of its kind under any name."""
    return next(iter(records.values())) if key not in records and len(records) == 1 else record_of(content, key, records)


def number(record: Mapping[str, Any], key: str) -> float:
    """A number, as int if it is whole: some clients report counts as floats."""
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
    """Send a note of JSON values and any number of records."""
    blobs: list[bytes] = []
    header = json.dumps({"note": dict(note), "contents": [_header_of(content, blobs) for content in contents]}).encode()
    link.sendall(LENGTH.pack(len(header)) + header)
    for blob in blobs:
        link.sendall(blob)


def receive_frame(link: socket.socket) -> tuple[dict[str, Any], list[RecordDict]]:
    """Receive a note and records. Raises ``ConnectionError`` if the connection is closed."""
    (size,) = LENGTH.unpack(_exactly(link, LENGTH.size))
    if size > MOST_HEADER:
        raise ValueError(f"the frame header is too long: {size} bytes, at most {MOST_HEADER} are allowed")
    header = json.loads(_exactly(link, size))
    return header["note"], [_rebuilt(content, link) for content in header["contents"]]


def _header_of(content: RecordDict, blobs: list[bytes]) -> dict[str, Any]:
    arrays = {}
    for name, record in content.array_records.items():
        arrays[name] = [[key, array.dtype, list(array.shape), array.stype, len(array.data)] for key, array in record.items()]
        blobs += [array.data for array in record.values()]
    metrics = {name: dict(record) for name, record in content.metric_records.items()}
    configs = {name: dict(record) for name, record in content.config_records.items()}
    return {"arrays": arrays, "metrics": metrics, "configs": configs}


def _rebuilt(header: Mapping[str, Any], link: socket.socket) -> RecordDict:
    content = RecordDict()
    for name, entries in header["arrays"].items():
        content[name] = ArrayRecord(
            {key: Array(dtype, tuple(shape), stype, _exactly(link, size)) for key, dtype, shape, stype, size in entries}
        )
    for name, values in header["metrics"].items():
        content[name] = MetricRecord(values)
    for name, values in header["configs"].items():
        content[name] = ConfigRecord(values)
    return content


def _exactly(link: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        count = link.recv_into(view[got:], min(size - got, 1 << 20))
        if count == 0:
            raise ConnectionError("the connection was closed by the other end")
        got += count
    return bytes(data)
