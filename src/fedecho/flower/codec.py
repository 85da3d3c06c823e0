"""Converts dispatches and updates to Flower's records and back, with arrays in the .npy format."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from math import isfinite, prod
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.lib import format as npy
from torch import Tensor

from fedecho.core.admission import MAX_NAME
from fedecho.core.layout import Layout
from fedecho.core.types import ClientUpdate, Dispatch, GlobalModel, Weights
from fedecho.flower.wire import (
    ARRAYS,
    CLIENT,
    CONFIG,
    CONTROL,
    CORRECTION,
    METRICS,
    NUM_EXAMPLES,
    NUM_STEPS,
    NUMBER,
    ROUND,
    SEED,
    VERSION,
    number,
    only_record,
    record_of,
    whole_number,
)

NUMPY = "numpy.ndarray"


def to_array(tensor: Tensor) -> Array:
    return Array(tensor.detach().cpu().contiguous().numpy())


def to_tensor(array: Array, name: str, shape: tuple[int, ...], dtype: str = "float32") -> Tensor:
    """Decode an array. Raises ValueError unless it has exactly this shape, type and size."""
    if array.stype != NUMPY:
        raise ValueError(f"{name!r} is serialized as {array.stype!r}, not {NUMPY!r}")
    actual_shape, fortran, actual_dtype, start = _header(array.data, name)
    if actual_shape != shape:
        raise ValueError(f"{name!r} must have shape {shape}, got {actual_shape}")
    if actual_dtype != np.dtype(dtype):
        raise ValueError(f"{name!r} must be of type {dtype}, got {actual_dtype}")
    size = prod(shape)
    if len(array.data) - start != size * actual_dtype.itemsize:
        raise ValueError(f"{name!r} must hold {size * actual_dtype.itemsize} bytes, got {len(array.data) - start}")
    if size == 0:
        return torch.zeros(shape, dtype=getattr(torch, dtype))
    values = np.frombuffer(bytearray(memoryview(array.data)[start:]), actual_dtype, size)
    return torch.from_numpy(values.reshape(shape, order="F" if fortran else "C"))


def shape_of(array: Array, name: str) -> tuple[tuple[int, ...], str]:
    """Shape and type from the header of the data, not from the array's own fields, which are not checked."""
    shape, _, kind, _ = _header(array.data, name)
    return shape, str(kind)


def _header(data: bytes, name: str) -> tuple[tuple[int, ...], bool, np.dtype[np.generic], int]:
    file = BytesIO(memoryview(data)[:4096])
    try:
        major, _ = npy.read_magic(file)
        read = npy.read_array_header_1_0 if major == 1 else npy.read_array_header_2_0
        shape, fortran, kind = read(file)
    except Exception as error:  # numpy parses the header as a Python literal, which can fail in many ways
        raise ValueError(f"{name!r} is not a valid array: {error}") from None
    return tuple(shape), bool(fortran), kind, file.tell()


MOST_METRICS = 64
"""Per answer, so that a client cannot fill the server's record."""

Records = dict[str, ArrayRecord | MetricRecord | ConfigRecord]


@dataclass(frozen=True)
class Codec:
    """Encodes and decodes messages for models of one layout.

    ``fixed`` arrays are sent with the model but never change, such as counters. ``tied`` maps further names to arrays of the
    layout, for layers that share a weight. ``config`` is added to every dispatch (Flower's ``train_config``). ``order`` lists
    all arrays in the user's order, since a client may rely on positions. With ``keep_examples`` the metrics of an update
    include ``num-examples``.
    """

    layout: Layout
    fixed: Mapping[str, Array] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    keep_examples: bool = False
    tied: Mapping[str, str] = field(default_factory=dict)

    def arrays(self, weights: Weights) -> ArrayRecord:
        """A model as an ``ArrayRecord`` with a name for each array."""
        named = {name: to_array(tensor) for name, tensor in self.layout.named(weights).items()} | dict(self.fixed)
        named |= {name: named[first] for name, first in self.tied.items()}
        return ArrayRecord({name: named[name] for name in self.order or named})

    def dispatch(self, dispatch: Dispatch) -> RecordDict:
        model = dispatch.model
        order = {ROUND: model.version + 1, NUMBER: dispatch.number, CLIENT: dispatch.client}
        order |= {VERSION: model.version, SEED: dispatch.seed}
        records: Records = {ARRAYS: self.arrays(model.weights), CONFIG: ConfigRecord({**self.config, **order})}
        if model.correction is not None:
            records[CORRECTION] = self._vector(model.correction)
        return RecordDict(records)

    def read_dispatch(self, content: RecordDict) -> Dispatch:
        config = record_of(content, CONFIG, content.config_records)
        number, client, version, seed = (whole_number(config, key) for key in (NUMBER, CLIENT, VERSION, SEED))
        weights = self._weights(record_of(content, ARRAYS, content.array_records))
        return Dispatch(number, client, GlobalModel(version, weights, self._read_vector(content, CORRECTION)), seed)

    def answer(self, update: ClientUpdate, trained: Weights) -> RecordDict:
        """Encode an update as the trained weights y, because recomputing them from the delta would round."""
        counts = {NUM_EXAMPLES: update.num_examples, NUM_STEPS: update.num_steps}
        records: Records = {ARRAYS: self.arrays(trained), METRICS: MetricRecord({**update.metrics, **counts})}
        if update.correction is not None:
            records[CORRECTION] = self._vector(update.correction)
        return RecordDict(records)

    def read_answer(self, content: RecordDict, dispatch: Dispatch) -> ClientUpdate:
        """Decode the answer to ``dispatch``. Raises ValueError with the reason if it is malformed."""
        metrics = dict(only_record(content, METRICS, content.metric_records))
        models = {name: record for name, record in content.array_records.items() if name != CORRECTION}
        trained = self._weights(only_record(content, ARRAYS, models))
        examples = number(metrics, NUM_EXAMPLES)
        return ClientUpdate(
            client=dispatch.client,
            base_version=dispatch.model.version,
            delta=trained.params - dispatch.model.weights.params.cpu(),
            buffers=trained.buffers,
            num_examples=examples,
            num_steps=_steps(metrics.get(NUM_STEPS)),
            correction=self._read_vector(content, CORRECTION),
            metrics={**({NUM_EXAMPLES: float(examples)} if self.keep_examples else {}), **_usable(metrics)},
        )

    def dropped(self, content: RecordDict) -> dict[str, str]:
        """The metrics that are dropped from a valid answer, with the reason. The update itself is used."""
        metrics = dict(only_record(content, METRICS, content.metric_records))
        kept = {NUM_EXAMPLES, NUM_STEPS, *_usable(metrics)}
        return {
            name: _defect_of(name, value) or f"there are more than {MOST_METRICS - 1} metrics"
            for name, value in metrics.items()
            if name not in kept
        }

    def control(self, control: Tensor) -> ArrayRecord:
        """Encode a client's control variate c_i, which it keeps between jobs."""
        return self._vector(control)

    def read_control(self, state: RecordDict) -> Tensor | None:
        return self._read_vector(state, CONTROL)

    def _weights(self, record: ArrayRecord) -> Weights:
        parts = (*self.layout.params, *self.layout.buffers)
        return self.layout.flatten({part.name: _tensor(record, part.name, part.shape) for part in parts})

    def _vector(self, flat: Tensor) -> ArrayRecord:
        """A vector as long as the parameters, split into arrays under their names."""
        return ArrayRecord({part.name: to_array(part.view(flat)) for part in self.layout.params})

    def _read_vector(self, content: RecordDict, key: str) -> Tensor | None:
        if key not in content.array_records:
            return None
        record = content.array_records[key]
        named = {part.name: _tensor(record, part.name, part.shape) for part in self.layout.params}
        return Layout(self.layout.params, ()).flatten(named).params


def _steps(value: Any) -> int:
    """The number of local steps. Other clients may leave it out, or use the name for something else."""
    return int(value) if isinstance(value, int | float) and isfinite(value) else 1


def _usable(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among the metrics, up to the limit."""
    others = {key: value for key, value in metrics.items() if key not in (NUM_EXAMPLES, NUM_STEPS)}
    usable = {key: float(value) for key, value in others.items() if not _defect_of(key, value)}
    return dict(list(usable.items())[: MOST_METRICS - 1])


def _defect_of(name: str, value: Any) -> str:
    if len(name) > MAX_NAME:
        return f"its name is longer than {MAX_NAME} characters"
    if not isinstance(value, int | float):
        return "it is a list, not a number"
    return "" if isfinite(value) else f"it is {value}"


def _tensor(record: ArrayRecord, name: str, shape: tuple[int, ...]) -> Tensor:
    if name not in record:
        raise ValueError(f"array {name!r} is missing from the weights")
    return to_tensor(record[name], name, shape)
