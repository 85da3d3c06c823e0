"""The model of a custom Flower app: flat vectors of what is federated, and arrays that are sent unchanged."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import Array, ArrayRecord
from torch import Tensor, nn

from fedecho.core.layout import BoundNetwork, Layout
from fedecho.core.modules import FullState
from fedecho.core.types import Weights
from fedecho.flower.codec import Codec, shape_of, to_array, to_tensor

STATISTICS = ("running_mean", "running_var")
"""Torch's names of running statistics, which are averaged but not optimized. Used only without a ``module``."""


@dataclass(frozen=True)
class UserModel:
    """A model with its layout. ``fixed`` holds frozen parameters and counters. All names keep the user's order."""

    layout: Layout
    weights: Weights
    fixed: Mapping[str, Array]
    full_state: FullState

    @classmethod
    def of(cls, arrays: ArrayRecord, module: nn.Module | None) -> "UserModel":
        layout, fixed = layout_of(arrays, module)
        parts = {part.name: part for part in (*layout.params, *layout.buffers)}
        federated = {name: name for name in parts} | (tied_in(module, layout) if module is not None else {})
        fixed = {name: array for name, array in fixed.items() if name not in federated}
        tensors = {name: _tensor(array, name) for name, array in fixed.items()}
        full_state = FullState(layout, tuple(arrays), {n: p for n, p in federated.items() if n in arrays}, tensors)
        weights = layout.flatten({name: to_tensor(arrays[name], name, part.shape) for name, part in parts.items()})
        return cls(layout, weights, fixed, full_state)

    def codec(self, config: Mapping[str, Any]) -> Codec:
        names = self.full_state.names
        tied = {name: first for name, first in self.full_state.federated.items() if name != first}
        return Codec(self.layout, self.fixed, config, order=names, keep_examples=True, tied=tied)

    def bound(self, module: nn.Module) -> BoundNetwork:
        """The server's copy of the module, with frozen parameters and counters set from the arrays."""
        network = self.layout.bind(module)
        own = network.module.state_dict(keep_vars=True)
        for name, tensor in self.full_state.fixed.items():
            if name in own:
                own[name].data = tensor
        return network

    def saved(self, tensors: Mapping[str, Tensor]) -> ArrayRecord:
        """A model read from its file, in the format of ``codec.arrays``."""
        return ArrayRecord({name: to_array(tensors[name]) for name in self.full_state.names})


def tied_in(module: nn.Module, layout: Layout) -> dict[str, str]:
    """Further names of tensors of the layout, for layers that share a weight."""
    return {name: first for name, first in FullState.of(module, layout).federated.items() if name != first}


def layout_of(arrays: ArrayRecord, module: nn.Module | None) -> tuple[Layout, dict[str, Array]]:
    """The layout of the federated arrays, and the remaining arrays."""
    shapes = {name: shape_of(array, name) for name, array in arrays.items()}
    odd = [f"{name!r} is {kind}" for name, (_, kind) in shapes.items() if kind.startswith("float") and kind != "float32"]
    if odd:
        raise ValueError(f"the arrays must be float32, but {odd[0]}: convert the model to float32")
    if module is not None:
        layout = Layout.of(module)
    else:
        tensors = {name: to_tensor(arrays[name], name, shape) for name, (shape, kind) in shapes.items() if kind == "float32"}
        running = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] in STATISTICS}
        layout = Layout.of_tensors({name: t for name, t in tensors.items() if name not in running}, running)
    names = {part.name for part in (*layout.params, *layout.buffers)}
    if missing := names - set(arrays):
        raise ValueError(f"initial_arrays lack {min(missing)!r}, which the module has")
    return layout, {name: array for name, array in arrays.items() if name not in names}


def _tensor(array: Array, name: str) -> Tensor:
    shape, kind = shape_of(array, name)
    return to_tensor(array, name, shape, kind)
