"""Records over a local socket: a JSON header and the arrays' bytes behind it. No pickle, and no torch: both ends import this."""

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

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
