"""Copying user modules, comparing their structure, and saving state dicts that load into them strictly."""

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedecho.core.types import Weights

if TYPE_CHECKING:
    from fedecho.core.layout import Layout


def copy_module(module: nn.Module) -> nn.Module:
    """Copy a module, with its own parameters and buffers in the same memory formats and modes.

    Parameters share storage with the original until they are rebound, as ``Layout.bind`` does with trained ones. A frozen
    language model is therefore in memory once. Shared parameters must not be written to in place.
    """
    memo: dict[int, Any] = {}
    for layer in module.modules():
        for param in layer._parameters.values():
            if type(param) is nn.Parameter and id(param) not in memo:
                memo[id(param)] = own = nn.Parameter(param.detach(), requires_grad=param.requires_grad)
                vars(own).update(vars(param))
        for value in vars(layer).values():
            if isinstance(value, Tensor) and not value.is_leaf:  # deepcopy rejects it, and the layer recomputes it
                memo[id(value)] = value.detach().clone()
    try:
        return deepcopy(module, memo)
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"the network {type(module).__name__} cannot be copied ({type(error).__name__}: {first_line}). A run trains a copy and "
            "never changes your module: remove what copy.deepcopy cannot copy, or define __deepcopy__"
        ) from error


PREDICTABLE = ("torch.nn.modules.", "fedecho.tasks.vision.", "fedecho.gpu.")
"""Packages whose layers compute a function of their type, their plain attributes and their tensors alone."""
TENSORS = ("_parameters", "_buffers", "_modules")


def structure_of(module: nn.Module) -> Hashable | None:
    """Return a key that is equal for modules computing the same function of their parameters and statistics.

    Return None where this cannot be decided. A ``repr`` is not enough: for a user's class it shows the layers, but not the code
    that calls them or its attributes. A layer or tensor that appears under two names gets one number, so that sharing it is part
    of the key.
    """
    layers: list[Hashable] = []
    numbers: dict[int, int] = {}
    for name, layer in module.named_modules(remove_duplicate=False):
        attributes = {key: vars(layer)[key] for key in sorted(vars(layer)) if key not in TENSORS}
        settings = {key: value for key, value in attributes.items() if not _is_empty(value)}
        own = [(key, value) for key, value in (*layer._parameters.items(), *layer._buffers.items()) if value is not None]
        if not type(layer).__module__.startswith(PREDICTABLE) or not all(
            _comes_with_weights(layer, key, value) for key, value in own
        ):
            return None
        if not all(_is_plain(value) for value in settings.values()):  # hooks, an instance's own forward, tensors, functions
            return None
        tensors = tuple((key, _number(value, numbers), value.shape, value.dtype, value.stride()) for key, value in own)
        # repr distinguishes 0, False, 0.0 and -0.0, which compare equal.
        layers.append((name, _number(layer, numbers), type(layer), type(layer).forward, repr(settings), tensors))
    return tuple(layers)


def _number(value: object, numbers: dict[int, int]) -> int:
    """Number objects in the order of first appearance."""
    return numbers.setdefault(id(value), len(numbers))


def _is_plain(value: Any) -> bool:
    return type(value) in (bool, int, float, str, NoneType) or (type(value) in (tuple, list) and all(map(_is_plain, value)))


def _is_empty(value: Any) -> bool:
    """Report whether this is an empty container, such as a dict of hooks without entries."""
    return type(value) in (dict, OrderedDict, set) and not value


def _comes_with_weights(layer: nn.Module, key: str, tensor: Tensor) -> bool:
    """Report whether the tensor comes with the weights or has no effect on the result.

    Others, such as a frozen parameter or a mask, would keep the first network's values.
    """
    if key in layer._parameters:
        return tensor.requires_grad
    return tensor.is_floating_point() or (isinstance(layer, nn.modules.batchnorm._BatchNorm) and key == "num_batches_tracked")


@dataclass(frozen=True)
class FullState:
    """All entries of ``module.state_dict()``, so that ``load_state_dict(strict=True)`` accepts them.

    Federated tensors come from a ``Weights``; a tied tensor appears under each of its names. Frozen parameters, counters and
    masks keep the module's values.
    """

    layout: "Layout"
    names: tuple[str, ...]
    """The names of all tensors, in the module's order."""
    federated: Mapping[str, str]
    """The name in the layout of each federated tensor."""
    fixed: Mapping[str, Tensor]
    """The tensors that are not federated."""

    @classmethod
    def of(cls, module: nn.Module, layout: "Layout") -> "FullState":
        saved = {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
        tensors: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        names = {id(tensors[part.name]): part.name for part in (*layout.params, *layout.buffers)}
        federated = {name: names[id(value)] for name, value in saved.items() if id(value) in names}
        # Frozen parameters never change; counters do, in the module that is trained, so they are copied.
        fixed = {
            name: value.detach() if isinstance(value, nn.Parameter) else value.clone()
            for name, value in saved.items()
            if name not in federated
        }
        return cls(layout, tuple(saved), federated, fixed)

    def named(self, weights: Weights) -> dict[str, Tensor]:
        """Return contiguous copies by name, on the device of the weights. No two share memory."""
        parts = {part.name: (part, weights.params) for part in self.layout.params}
        parts |= {part.name: (part, weights.buffers) for part in self.layout.buffers}
        tensors = {}
        for name in self.names:
            if name in self.federated:
                part, flat = parts[self.federated[name]]
                tensor = part.view(flat)
            else:
                tensor = self.fixed[name].to(weights.params.device)
            tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
        return tensors
