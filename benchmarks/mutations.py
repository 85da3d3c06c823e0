"""Ways for an update to be invalid or unusual. Each takes the update, its base model and a random generator."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedecho.core.randomness import numpy_rng
from fedecho.core.types import ClientUpdate, GlobalModel

HUGE = 10**5000
"""More digits than Python turns into a string."""

Mutation = Callable[[ClientUpdate, GlobalModel, int], ClientUpdate]


def _one(value: float) -> Callable[[Tensor, int], Any]:
    def change(tensor: Tensor, draw: int) -> Tensor:
        changed = tensor.clone()
        changed[draw % len(changed)] = value
        return changed

    return change


def _cast(dtype: torch.dtype) -> Callable[[Tensor, int], Any]:
    return lambda tensor, draw: tensor.to(dtype)


def _grown(tensor: Tensor, draw: int) -> Tensor:
    return (tensor.clone().requires_grad_() * 2).view_as(tensor)


def _inference(tensor: Tensor, draw: int) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


def _bits(tensor: Tensor, draw: int) -> Tensor:
    return torch.frombuffer(bytearray(numpy_rng(0, "bits", draw).bytes(4 * len(tensor))), dtype=torch.float32)


class Angry(Tensor):
    """A tensor that does what it likes when it is computed with."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("surprise")


TENSORS: dict[str, Callable[[Tensor, int], Any]] = {
    "empty": lambda t, d: t[:0],
    "one short": lambda t, d: t[:-1],
    "one long": lambda t, d: torch.cat([t, t[:1]]),
    "a column": lambda t, d: t[:, None],
    "a scalar": lambda t, d: t.sum(),
    "a million entries of one": lambda t, d: t[:1].expand(10**6),
    "any length": lambda t, d: torch.zeros(d % 5000),
    "one nan": _one(float("nan")),
    "one inf": _one(float("inf")),
    "one -inf": _one(float("-inf")),
    "the largest float": _one(3.4e38),
    "a norm that overflows": lambda t, d: torch.full_like(t, 1e25),
    "large": lambda t, d: t * 1e15,
    "minus zero": lambda t, d: torch.full_like(t, -0.0),
    "denormal": lambda t, d: torch.full_like(t, 1e-45),
    "every bit drawn": _bits,
    "not contiguous": lambda t, d: torch.stack([t, t], 1)[:, 0],
    "stride 0": lambda t, d: t[:1].expand(len(t)),
    "reversed twice": lambda t, d: t.flip(0).flip(0),
    "a lazy negation": lambda t, d: torch._neg_view(-t),
    "a leaf that wants gradients": lambda t, d: t.clone().requires_grad_(),
    "with a graph": _grown,
    "an inference tensor": _inference,
    "a parameter": lambda t, d: torch.nn.Parameter(t.clone(), requires_grad=False),
    "on meta": lambda t, d: t.to("meta"),
    "sparse": lambda t, d: t.to_sparse(),
    "sparse rows": lambda t, d: t[None].to_sparse_csr(),
    "blocked": lambda t, d: t.to_mkldnn(),
    "float64": _cast(torch.float64),
    "float16": _cast(torch.float16),
    "bfloat16": _cast(torch.bfloat16),
    "float8": _cast(torch.float8_e4m3fn),
    "int64": _cast(torch.int64),
    "uint8": _cast(torch.uint8),
    "bool": _cast(torch.bool),
    "complex": _cast(torch.complex64),
    "a conjugate": lambda t, d: t.to(torch.complex64).conj(),
    "the imaginary part": lambda t, d: torch.complex(t, t).imag,
    "quantised": lambda t, d: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
    "an angry subclass": lambda t, d: t.clone().as_subclass(Angry),
    "None": lambda t, d: None,
    "a list": lambda t, d: t.tolist(),
    "numpy's": lambda t, d: t.numpy(),
    "a number": lambda t, d: 1.0,
    "a string": lambda t, d: "delta",
}

NUMBERS: dict[str, Any] = {
    "0": 0,
    "-1": -1,
    "-2**63": -(2**63),
    "2**63": 2**63,
    "10**400": 10**400,
    "10**5000": HUGE,
    "-10**5000": -HUGE,
    "True": True,
    "1.5": 1.5,
    "1.0": 1.0,
    "nan": float("nan"),
    "inf": float("inf"),
    "'7'": "7",
    "a long string": "7" * 100_000,
    "None": None,
    "a list": [1],
    "numpy's 5": np.int64(5),
    "torch's 5": torch.tensor(5),
    "complex": 1j,
}


class Trap(Mapping[str, float]):
    """A mapping that raises, or says one thing and holds another."""

    def __getitem__(self, key: str) -> float:
        raise KeyError(key)

    def __iter__(self) -> Any:
        raise RuntimeError("surprise")

    def __len__(self) -> int:
        return 1


METRICS: dict[str, Any] = {
    "none": {},
    "None": None,
    "a list": [("loss", 1.0)],
    "a trap": Trap(),
    "nan": {"loss": float("nan")},
    "inf": {"loss": float("inf")},
    "10**400": {"loss": 10**400},
    "10**5000": {"loss": HUGE},
    "a string": {"loss": "1"},
    "a bool": {"loss": True},
    "numpy's": {"loss": np.float32(1)},
    "numpy's nan": {"loss": np.float64("nan")},
    "torch's": {"loss": torch.tensor(1.0)},
    "nested": {"loss": {"loss": {}}},
    "None inside": {"loss": None},
    "no name": {"": 1.0},
    "a number for a name": {1: 1.0},
    "a thousand": {f"metric {number}": 1.0 for number in range(1000)},
    "a long name": {"x" * 100_000: 1.0},
    "a lone surrogate": {"\ud800": 1.0},
    "the record's own names": {"event": 1, "status": 2, "time": 3, "dispatch": 4, "client": 5, "reason": 6, "norm": 7},
    "line ends": {'a\n{"event":"header"}\n': 1.0},
}


def _tensor(name: str, change: Callable[[Tensor, int], Any]) -> Mutation:
    def mutation(update: ClientUpdate, model: GlobalModel, draw: int) -> ClientUpdate:
        return replace(update, **{name: change(getattr(update, name), draw)})

    return mutation


def _field(name: str, value: Any) -> Mutation:
    return lambda update, model, draw: replace(update, **{name: value})


def _off_by(name: str, by: int) -> Mutation:
    return lambda update, model, draw: replace(update, **{name: getattr(update, name) + by})


MUTATIONS: dict[str, Mutation] = {
    **{
        f"{name}: {kind}": _tensor(name, change)
        for name in ("delta", "buffers", "correction")
        for kind, change in TENSORS.items()
    },
    **{
        f"{name}: {kind}": _field(name, value)
        for name in ("num_examples", "num_steps", "base_version", "client")
        for kind, value in NUMBERS.items()
    },
    **{f"metrics: {kind}": _field("metrics", value) for kind, value in METRICS.items()},
    "base_version: one later": _off_by("base_version", 1),
    "base_version: one earlier": _off_by("base_version", -1),
    "base_version: as a float": lambda update, model, draw: replace(update, base_version=float(update.base_version)),
    "client: as a float": lambda update, model, draw: replace(update, client=float(update.client)),
    "client: another": lambda update, model, draw: replace(update, client=draw % 10),
    "delta: the model itself": lambda update, model, draw: replace(update, delta=model.weights.params),
    "correction: the delta itself": lambda update, model, draw: replace(update, correction=update.delta),
}
