"""Where a traced network ends a normalisation in a ReLU: relu(norm(x)), and relu(norm(x) + extra) as residual networks have it."""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn.functional import relu


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
