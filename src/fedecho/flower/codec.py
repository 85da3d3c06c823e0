"""Dispatches and updates as Flower's records and back, with arrays in the .npy format."""

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
    """The array as a tensor of this very shape and type; anything else is an error that says what came."""
    if array.stype != NUMPY:
        raise ValueError(f"{name!r} is serialized as {array.stype!r}, not {NUMPY!r}")
    got, fortran, kind, start = _header(array.data, name)
    if got != shape:
        raise ValueError(f"{name!r} must have shape {shape}, got {got}")
    if kind != np.dtype(dtype):
        raise ValueError(f"{name!r} must be of type {dtype}, got {kind}")
    size = prod(shape)
    if len(array.data) - start != size * kind.itemsize:
        raise ValueError(f"{name!r} holds {len(array.data) - start} bytes, not {size * kind.itemsize}")
    if size == 0:
        return torch.zeros(shape, dtype=getattr(torch, dtype))
    values = np.frombuffer(bytearray(memoryview(array.data)[start:]), kind, size)
    return torch.from_numpy(values.reshape(shape, order="F" if fortran else "C"))


def shape_of(array: Array, name: str) -> tuple[tuple[int, ...], str]:
    """Shape and type as the data says, not as the label does."""
    shape, _, kind, _ = _header(array.data, name)
    return shape, str(kind)


def _header(data: bytes, name: str) -> tuple[tuple[int, ...], bool, np.dtype[np.generic], int]:
    file = BytesIO(memoryview(data)[:4096])
    try:
        major, _ = npy.read_magic(file)
        read = npy.read_array_header_1_0 if major == 1 else npy.read_array_header_2_0
        shape, fortran, kind = read(file)
    except Exception as error:  # numpy evaluates the header as Python text, which fails in many ways
        raise ValueError(f"{name!r} is no array: {error}") from None
    return tuple(shape), bool(fortran), kind, file.tell()


MOST_METRICS = 64
"""Of one answer: a client must not fill the server's record."""
Records = dict[str, ArrayRecord | MetricRecord | ConfigRecord]


@dataclass(frozen=True)
class Codec:
    """For models of one layout. ``fixed`` are arrays that travel with the model and never change (counters of a user's model).

    ``tied`` are further names of arrays of the layout, as of a user's module whose layers share a weight.
    ``config`` goes with every dispatch (a user's ``train_config``). ``order`` is that of a user's own arrays, whose client may
    know them by their place alone. With ``keep_examples`` an update's metrics hold ``num-examples`` too.
    """

    layout: Layout
    fixed: Mapping[str, Array] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    keep_examples: bool = False
    tied: Mapping[str, str] = field(default_factory=dict)

    def arrays(self, weights: Weights) -> ArrayRecord:
        """A model as Flower users know it."""
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
        """``trained`` is y, the client's own weights: the update's delta would have lost its last bits."""
        counts = {NUM_EXAMPLES: update.num_examples, NUM_STEPS: update.num_steps}
        records: Records = {ARRAYS: self.arrays(trained), METRICS: MetricRecord({**update.metrics, **counts})}
        if update.correction is not None:
            records[CORRECTION] = self._vector(update.correction)
        return RecordDict(records)

    def read_answer(self, content: RecordDict, dispatch: Dispatch) -> ClientUpdate:
        """The update that answers ``dispatch``. A ValueError says what cannot be read."""
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
        """The metrics of a readable answer that are not kept, and why. The update counts all the same."""
        metrics = dict(only_record(content, METRICS, content.metric_records))
        kept = {NUM_EXAMPLES, NUM_STEPS, *_usable(metrics)}
        return {
            name: _why_not(name, value) or f"there are more than {MOST_METRICS - 1}"
            for name, value in metrics.items()
            if name not in kept
        }

    def control(self, control: Tensor) -> ArrayRecord:
        """c_i, a client's own memory between jobs."""
        return self._vector(control)

    def read_control(self, state: RecordDict) -> Tensor | None:
        return self._read_vector(state, CONTROL)

    def _weights(self, record: ArrayRecord) -> Weights:
        parts = (*self.layout.params, *self.layout.buffers)
        return self.layout.flatten({part.name: _tensor(record, part.name, part.shape) for part in parts})

    def _vector(self, flat: Tensor) -> ArrayRecord:
        """A vector of the parameters' length, under their names."""
        return ArrayRecord({part.name: to_array(part.view(flat)) for part in self.layout.params})

    def _read_vector(self, content: RecordDict, key: str) -> Tensor | None:
        if key not in content.array_records:
            return None
        record = content.array_records[key]
        named = {part.name: _tensor(record, part.name, part.shape) for part in self.layout.params}
        return Layout(self.layout.params, ()).flatten(named).params


def _steps(value: Any) -> int:
    """Our clients say how many they made; of a foreign one it may be any metric."""
    return int(value) if isinstance(value, int | float) and isfinite(value) else 1


def _usable(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among the metrics, as many as may be kept beside the number of examples."""
    others = {key: value for key, value in metrics.items() if key not in (NUM_EXAMPLES, NUM_STEPS)}
    usable = {key: float(value) for key, value in others.items() if not _why_not(key, value)}
    return dict(list(usable.items())[: MOST_METRICS - 1])


def _why_not(name: str, value: Any) -> str:
    if len(name) > MAX_NAME:
        return f"its name is longer than {MAX_NAME} characters"
    if not isinstance(value, int | float):
        return "it is a list, and only numbers are kept"
    return "" if isfinite(value) else f"it is {value}"


def _tensor(record: ArrayRecord, name: str, shape: tuple[int, ...]) -> Tensor:
    if name not in record:
        raise ValueError(f"the weights lack {name!r}")
    return to_tensor(record[name], name, shape)
