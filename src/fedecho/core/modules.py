"""A user's module: we work on a copy and never change his, and what we save of it loads into his, strictly."""

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


def copied(module: nn.Module) -> nn.Module:
    """The module again, with parameters and buffers of its own, in the same memory formats and modes.

    Parameters share their storage until somebody gives them another, as ``Layout.bind`` does with those that are trained:
    a frozen language model is in memory once. Nobody writes to them in place.
    """
    memo: dict[int, Any] = {}
    for layer in module.modules():
        for param in layer._parameters.values():
            if type(param) is nn.Parameter and id(param) not in memo:
                memo[id(param)] = own = nn.Parameter(param.detach(), requires_grad=param.requires_grad)
                vars(own).update(vars(param))
        for value in vars(layer).values():
            if isinstance(value, Tensor) and not value.is_leaf:  # which deepcopy refuses; the layer computes it anew
                memo[id(value)] = value.detach().clone()
    try:
        return deepcopy(module, memo)
    except Exception as error:
        said = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"the network {type(module).__name__} cannot be copied ({type(error).__name__}: {said}); a run trains a copy, so that "
            "your module is never changed: keep what copy.deepcopy does not take out of it, or give it a __deepcopy__"
        ) from error


KNOWN = ("torch.nn.modules.", "fedecho.tasks.vision.", "fedecho.gpu.")
"""Where the layers are defined whose forward is a function of their type, their plain attributes and their tensors."""
TENSORS = ("_parameters", "_buffers", "_modules")


def structure_of(module: nn.Module) -> Hashable | None:
    """Equal for two modules that are the same function of their parameters and statistics; None where nobody can tell.

    A ``repr`` does not say it: of a user's class it shows the layers inside, not the code that calls them nor the numbers it keeps.
    A layer or a tensor that is there under two names has one number, so that a network that uses it twice is another one.
    """
    found: list[Hashable] = []
    numbers: dict[int, int] = {}
    for name, layer in module.named_modules(remove_duplicate=False):
        known = {key: vars(layer)[key] for key in sorted(vars(layer)) if key not in TENSORS}
        settings = {key: value for key, value in known.items() if not _is_empty(value)}
        own = [(key, value) for key, value in (*layer._parameters.items(), *layer._buffers.items()) if value is not None]
        if not type(layer).__module__.startswith(KNOWN) or not all(_is_given(layer, key, value) for key, value in own):
            return None
        if not all(_is_plain(value) for value in settings.values()):  # hooks, a forward of its own, tensors, functions
            return None
        tensors = tuple((key, _number(value, numbers), value.shape, value.dtype, value.stride()) for key, value in own)
        # Its text tells 0 from False, 0.0 and -0.0, which are equal.
        found.append((name, _number(layer, numbers), type(layer), type(layer).forward, repr(settings), tensors))
    return tuple(found)


def _number(value: object, numbers: dict[int, int]) -> int:
    """In the order of first appearance."""
    return numbers.setdefault(id(value), len(numbers))


def _is_plain(value: Any) -> bool:
    return type(value) in (bool, int, float, str, NoneType) or (type(value) in (tuple, list) and all(map(_is_plain, value)))


def _is_empty(value: Any) -> bool:
    """As the registers of hooks are where there are none."""
    return type(value) in (dict, OrderedDict, set) and not value


def _is_given(layer: nn.Module, key: str, tensor: Tensor) -> bool:
    """Does it come with the weights, or do nothing? A frozen parameter or a mask would keep the first network's values."""
    if key in layer._parameters:
        return tensor.requires_grad
    return tensor.is_floating_point() or (isinstance(layer, nn.modules.batchnorm._BatchNorm) and key == "num_batches_tracked")


@dataclass(frozen=True)
class FullState:
    """All that ``module.state_dict()`` holds, so that ``load_state_dict(strict=True)`` takes it.

    What is federated comes from a ``Weights``; a tied tensor is there under each of its names. Frozen parameters, counters and
    masks are what they were in the module.
    """

    layout: "Layout"
    names: tuple[str, ...]
    """Of all tensors, in the module's order."""
    federated: Mapping[str, str]
    """Name in the layout of each tensor that has a place there."""
    fixed: Mapping[str, Tensor]

    @classmethod
    def of(cls, module: nn.Module, layout: "Layout") -> "FullState":
        saved = {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
        tensors: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        places = {id(tensors[part.name]): part.name for part in (*layout.params, *layout.buffers)}
        federated = {name: places[id(value)] for name, value in saved.items() if id(value) in places}
        # A frozen parameter stays as it is; counters count on in the module that is trained.
        fixed = {
            name: value.detach() if isinstance(value, nn.Parameter) else value.clone()
            for name, value in saved.items()
            if name not in federated
        }
        return cls(layout, tuple(saved), federated, fixed)

    def named(self, weights: Weights) -> dict[str, Tensor]:
        """Contiguous copies under their names, where the weights are; no two share memory."""
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
