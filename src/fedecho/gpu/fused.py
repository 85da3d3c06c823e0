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
class ReluSite:
    """A ReLU (``end``) of ``norm``, or of ``norm`` + ``extra``. Nothing else uses ``norm`` or the sum."""

    end: fx.Node
    norm: fx.Node
    extra: Any


class LeafTracer(fx.Tracer):
    """A tracer that does not look inside modules of the given classes."""

    def __init__(self, *leaves: type[nn.Module]) -> None:
        super().__init__()
        self._leaves = leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, self._leaves) or super().is_leaf_module(m, module_qualified_name)


def traced(module: nn.Module, *leaves: type[nn.Module]) -> fx.GraphModule | None:
    """Trace the network, or return None if its control flow depends on data."""
    try:
        return fx.GraphModule(module, LeafTracer(*leaves).trace(module))
    except Exception:  # tracing such a network can raise anything
        return None


def relu_sites(network: fx.GraphModule, is_norm: Callable[[fx.Node], bool]) -> Iterator[ReluSite]:
    """Yield each ReLU after a norm in the order of computation; the graph may be changed between yields."""
    for node in list(network.graph.nodes):
        if not _is_relu(node, network):
            continue
        before = node.args[0]
        if not isinstance(before, fx.Node) or len(before.users) != 1:
            continue
        if is_norm(before):
            yield ReluSite(node, before, None)
        elif before.op == "call_function" and before.target is operator.add:
            for main, extra in (before.args, before.args[::-1]):
                if isinstance(main, fx.Node) and len(main.users) == 1 and is_norm(main):
                    yield ReluSite(node, main, extra)
                    break


def _is_relu(node: fx.Node, network: fx.GraphModule) -> bool:
    if node.op == "call_module":
        return isinstance(network.get_submodule(str(node.target)), nn.ReLU)
    return node.op == "call_function" and node.target in (relu, torch.relu)


def cleaned_up(network: fx.GraphModule) -> fx.GraphModule:
    """Remove unused nodes and modules after a change, and recompile."""
    network.graph.eliminate_dead_code()
    network.graph.lint()
    network.recompile()
    network.delete_all_unused_submodules()
    return network


Folded = dict[str, tuple[Tensor, Tensor]]
"""Folded kernel and bias of each convolution, by name."""


@dataclass(frozen=True)
class FoldedPair:
    """A convolution and the BatchNorm that follows it."""

    conv: str
    norm: str
    eps: float


Fold = Callable[[tuple["FoldedPair", ...], Mapping[str, Tensor], torch.dtype], Folded]
Inference = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Tensor, Tensor], Tensor]
"""(parameters, buffers, images, unused row weights) -> logits."""


def fused_inference(module: nn.Module, dtype: torch.dtype, compiled: Callable[[Fold], Fold]) -> Inference | None:
    """Turn the module in eval mode into a function of its tensors; None if it cannot be traced or has nothing to fuse."""
    network = traced(module.eval())
    pairs = () if network is None else _Rewriting(network).run()
    if network is None or not pairs:
        return None
    fold = compiled(_fold)
    unfused = list(network.state_dict())

    def forward(params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], images: Tensor, row_weight: Tensor) -> Tensor:
        tensors = {**params, **buffers}
        folded = fold(pairs, tensors, dtype)
        rest = {name: tensors[name].to(dtype) for name in unfused}
        logits: Tensor = functional_call(network, rest, (images.to(dtype), folded))
        return logits.float()

    return forward


def _fold(pairs: tuple[FoldedPair, ...], tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Folded:
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
    """relu(kernel * x + bias + extra), as one cuDNN kernel where available."""
    if x.is_cuda and x.dtype != torch.float32:
        ones = [1, 1]
        if extra is None:
            return torch.cudnn_convolution_relu(x, kernel, bias, stride, padding, ones, 1)
        return torch.cudnn_convolution_add_relu(x, kernel, extra, 1.0, bias, stride, padding, ones, 1)
    y = conv2d(x, kernel, bias, stride, padding)
    return relu(y if extra is None else y + extra)


def shortcut_convolution(x: Tensor, kernel: Tensor, stride: Any, padding: Any) -> Tensor:
    """The convolution of a shortcut; its bias is added to that of the main convolution."""
    return conv2d(x, kernel, None, stride, padding)


class _Rewriting:
    """Replaces conv -> norm -> relu and conv -> norm -> (+ shortcut) -> relu by one call on folded tensors."""

    def __init__(self, network: fx.GraphModule) -> None:
        self.network, self.graph = network, network.graph
        self.pairs: dict[FoldedPair, None] = {}
        images = next(node for node in self.graph.nodes if node.op == "placeholder")
        with self.graph.inserting_after(images):
            self.folded = self.graph.placeholder("folded")

    def run(self) -> tuple[FoldedPair, ...]:
        for site in relu_sites(self.network, lambda node: self._conv_before(node) is not None):
            self._replace(site)
        cleaned_up(self.network)
        return tuple(self.pairs)

    def _replace(self, site: ReluSite) -> None:
        """Insert the fused call; the bias of a folded shortcut is added to the main bias."""
        conv, extra = self._conv_before(site.norm), site.extra
        assert conv is not None  # noqa: S101 (for the type checker)
        with self.graph.inserting_before(site.end):
            kernel, bias = self._tensors(conv, site.norm)
            if isinstance(extra, fx.Node) and len(extra.users) == 1 and (shortcut := self._conv_before(extra)) is not None:
                more_kernel, more_bias = self._tensors(shortcut, extra)
                extra = self.graph.call_function(shortcut_convolution, (shortcut.args[0], more_kernel, *self._shape(shortcut)))
                bias = self.graph.call_function(operator.add, (bias, more_bias))
            fused = self.graph.call_function(convolution, (conv.args[0], extra, kernel, bias, *self._shape(conv)))
        site.end.replace_all_uses_with(fused)

    def _conv_before(self, node: fx.Node) -> fx.Node | None:
        """Return the convolution before the BatchNorm ``node`` if nothing else uses its output."""
        if not isinstance(self._layer(node), nn.BatchNorm2d):
            return None
        conv = node.args[0]
        return conv if isinstance(conv, fx.Node) and len(conv.users) == 1 and _suits(self._layer(conv)) else None

    def _tensors(self, conv: fx.Node, norm: fx.Node) -> tuple[fx.Node, fx.Node]:
        layer = self._layer(norm)
        assert isinstance(layer, nn.BatchNorm2d)  # noqa: S101 (for the type checker)
        self.pairs[FoldedPair(str(conv.target), str(norm.target), layer.eps)] = None
        both = self.graph.call_function(operator.getitem, (self.folded, str(conv.target)))
        kernel, bias = (self.graph.call_function(operator.getitem, (both, index)) for index in (0, 1))
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
