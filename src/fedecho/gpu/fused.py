"""Inference with each BatchNorm folded into the convolution before it and ReLU fused into it."""

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.nn.functional import conv2d, relu


@dataclass(frozen=True)
class Rectified:
    """``end`` is the ReLU of ``norm``, to which ``extra`` is added where there is one. Nobody else uses ``norm`` or the sum."""

    end: fx.Node
    norm: fx.Node
    extra: Any


class LeafTracer(fx.Tracer):
    """Takes some modules as they are."""

    def __init__(self, *leaves: type[nn.Module]) -> None:
        super().__init__()
        self._leaves = leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, self._leaves) or super().is_leaf_module(m, module_qualified_name)


def traced(module: nn.Module, *leaves: type[nn.Module]) -> fx.GraphModule | None:
    """None for a network whose way depends on its data."""
    try:
        return fx.GraphModule(module, LeafTracer(*leaves).trace(module))
    except Exception:  # torch.fx raises whatever such a way led to
        return None


def all_rectified(network: fx.GraphModule, is_norm: Callable[[fx.Node], bool]) -> Iterator[Rectified]:
    """Each place, in the order of computation; the graph may be changed meanwhile."""
    for node in list(network.graph.nodes):
        if not _is_relu(node, network):
            continue
        before = node.args[0]
        if not isinstance(before, fx.Node) or len(before.users) != 1:
            continue
        if is_norm(before):
            yield Rectified(node, before, None)
        elif before.op == "call_function" and before.target is operator.add:
            for main, extra in (before.args, before.args[::-1]):
                if isinstance(main, fx.Node) and len(main.users) == 1 and is_norm(main):
                    yield Rectified(node, main, extra)
                    break


def _is_relu(node: fx.Node, network: fx.GraphModule) -> bool:
    if node.op == "call_module":
        return isinstance(network.get_submodule(str(node.target)), nn.ReLU)
    return node.op == "call_function" and node.target in (relu, torch.relu)


def tidied(network: fx.GraphModule) -> fx.GraphModule:
    """After a change: nothing that nobody uses."""
    network.graph.eliminate_dead_code()
    network.graph.lint()
    network.recompile()
    network.delete_all_unused_submodules()
    return network


Folded = dict[str, tuple[Tensor, Tensor]]
"""Kernel and bias of each convolution, by its name."""


@dataclass(frozen=True)
class Pair:
    """A convolution and the BatchNorm behind it."""

    conv: str
    norm: str
    eps: float


Fold = Callable[[tuple["Pair", ...], Mapping[str, Tensor], torch.dtype], Folded]
Inference = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Tensor, Tensor], Tensor]
"""(parameters, buffers, images, row weights, which play no part here) -> logits."""


def fused_inference(module: nn.Module, dtype: torch.dtype, compiled: Callable[[Fold], Fold]) -> Inference | None:
    """The module in ``eval`` as a function of its tensors, or None where there is nothing to fuse or it cannot be traced."""
    network = traced(module.eval())
    pairs = () if network is None else _Rewriting(network).run()
    if network is None or not pairs:
        return None
    fold = compiled(_fold)
    left = list(network.state_dict())

    def forward(params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], images: Tensor, row_weight: Tensor) -> Tensor:
        tensors = {**params, **buffers}
        folded = fold(pairs, tensors, dtype)
        rest = {name: tensors[name].to(dtype) for name in left}
        logits: Tensor = functional_call(network, rest, (images.to(dtype), folded))
        return logits.float()

    return forward


def _fold(pairs: tuple[Pair, ...], tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Folded:
    """gamma (w * x + b - mu) / sigma + beta, as one kernel and one bias."""
    folded = {}
    for pair in pairs:
        scale = tensors[f"{pair.norm}.weight"] * torch.rsqrt(tensors[f"{pair.norm}.running_var"] + pair.eps)
        offset = tensors.get(f"{pair.conv}.bias", 0.0) - tensors[f"{pair.norm}.running_mean"]
        kernel = tensors[f"{pair.conv}.weight"].float() * scale[:, None, None, None]
        bias = tensors[f"{pair.norm}.bias"] + offset * scale
        folded[pair.conv] = kernel.to(dtype), bias.to(dtype)
    return folded


def convolution(x: Tensor, extra: Tensor | None, kernel: Tensor, bias: Tensor, stride: Any, padding: Any) -> Tensor:
    """relu(kernel * x + bias + extra), in one kernel where cuDNN has it."""
    if x.is_cuda and x.dtype != torch.float32:
        ones = [1, 1]
        if extra is None:
            return torch.cudnn_convolution_relu(x, kernel, bias, stride, padding, ones, 1)
        return torch.cudnn_convolution_add_relu(x, kernel, extra, 1.0, bias, stride, padding, ones, 1)
    y = conv2d(x, kernel, bias, stride, padding)
    return relu(y if extra is None else y + extra)


def beside(x: Tensor, kernel: Tensor, stride: Any, padding: Any) -> Tensor:
    """A shortcut's convolution, whose bias went to the convolution it is added to."""
    return conv2d(x, kernel, None, stride, padding)


class _Rewriting:
    """conv -> norm -> relu, and conv -> norm -> (+ shortcut) -> relu, each replaced by one call on folded tensors."""

    def __init__(self, network: fx.GraphModule) -> None:
        self.network, self.graph = network, network.graph
        self.pairs: dict[Pair, None] = {}
        images = next(node for node in self.graph.nodes if node.op == "placeholder")
        with self.graph.inserting_after(images):
            self.folded = self.graph.placeholder("folded")

    def run(self) -> tuple[Pair, ...]:
        for place in all_rectified(self.network, lambda node: self._conv_before(node) is not None):
            self._replace(place)
        tidied(self.network)
        return tuple(self.pairs)

    def _replace(self, place: Rectified) -> None:
        """One call; where a folded shortcut is added, its bias goes along."""
        conv, extra = self._conv_before(place.norm), place.extra
        assert conv is not None  # noqa: S101 (for the type checker)
        with self.graph.inserting_before(place.end):
            kernel, bias = self._tensors(conv, place.norm)
            if isinstance(extra, fx.Node) and len(extra.users) == 1 and (shortcut := self._conv_before(extra)) is not None:
                more_kernel, more_bias = self._tensors(shortcut, extra)
                extra = self.graph.call_function(beside, (shortcut.args[0], more_kernel, *self._shape(shortcut)))
                bias = self.graph.call_function(operator.add, (bias, more_bias))
            fused = self.graph.call_function(convolution, (conv.args[0], extra, kernel, bias, *self._shape(conv)))
        place.end.replace_all_uses_with(fused)

    def _conv_before(self, node: fx.Node) -> fx.Node | None:
        """The convolution whose BatchNorm ``node`` is, if nobody else uses it."""
        if not isinstance(self._layer(node), nn.BatchNorm2d):
            return None
        conv = node.args[0]
        return conv if isinstance(conv, fx.Node) and len(conv.users) == 1 and _suits(self._layer(conv)) else None

    def _tensors(self, conv: fx.Node, norm: fx.Node) -> tuple[fx.Node, fx.Node]:
        layer = self._layer(norm)
        assert isinstance(layer, nn.BatchNorm2d)  # noqa: S101 (for the type checker)
        self.pairs[Pair(str(conv.target), str(norm.target), layer.eps)] = None
        both = self.graph.call_function(operator.getitem, (self.folded, str(conv.target)))
        kernel, bias = (self.graph.call_function(operator.getitem, (both, place)) for place in (0, 1))
        return kernel, bias

    def _shape(self, conv: fx.Node) -> tuple[Any, Any]:
        layer: Any = self._layer(conv)
        return layer.stride, layer.padding

    def _layer(self, node: fx.Node) -> nn.Module | None:
        return self.network.get_submodule(str(node.target)) if node.op == "call_module" else None


def _suits(layer: nn.Module | None) -> bool:
    if not isinstance(layer, nn.Conv2d):
        return False
    plain = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
    return plain and not isinstance(layer.padding, str)
