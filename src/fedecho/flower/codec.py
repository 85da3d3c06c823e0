"""Dispatches and updates as Flower's records and back.

A dispatch is what Flower's own strategies send (``arrays``, ``config`` with ``server-round``) and an answer what every Flower
client gives: its new weights in one array record, ``num-examples`` in one metric record, whatever the two are called. The server
subtracts its base from the new weights, which is the client's own subtraction, to the last bit: x + (y - x) would not be y.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fedecho.core.admission import MAX_NAME
from fedecho.core.layout import Layout
from fedecho.core.types import ClientUpdate, Dispatch, GlobalModel, Weights
from fedecho.flower.keys import (
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
from fedecho.flower.npy import to_array, to_tensor

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
