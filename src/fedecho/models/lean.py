"""A language model that trains adapters in low precision, with less traffic through memory.

transformers' RMSNorm passes everything through float32, an operation at a time; torch's own does the same, but for rounding.
peft takes the adapters' inputs to float32, from where autocast takes them back to the same bits.
"""

from contextlib import suppress
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

EPS = ("variance_epsilon", "eps", "epsilon")
"""What the models call the number in their RMSNorm."""


class FusedRMSNorm(nn.Module):
    """torch's own, in float32 within, and one kernel where it has one. Takes the place of a model's under the same name."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        # Autocast would make it float32 outside too.
        with torch.autocast(x.device.type, enabled=False):
            return rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def lean(model: nn.Module) -> nn.Module:
    """The same model, changed in place, for use under autocast; its weights must still be as they were loaded."""
    whole: Any = model
    head = whole.get_output_embeddings()  # a bank applies it without autocast
    for name, module in list(model.named_modules()):
        if hasattr(module, "lora_A") and module is not head:
            cast: Any = module
            cast.cast_input_dtype_enabled = False  # autocast brings the adapters' weights to the input's precision
        elif (eps := _eps_of(module)) is not None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, FusedRMSNorm(module.weight, eps))
    return model


def _eps_of(module: nn.Module) -> float | None:
    """The number in it if this is a plain RMSNorm, which it must show: some multiply by 1 + weight, or by a gate."""
    weight, eps = getattr(module, "weight", None), next((getattr(module, name) for name in EPS if hasattr(module, name)), None)
    if "RMSNorm" not in type(module).__name__ or not isinstance(weight, nn.Parameter) or not isinstance(eps, float):
        return None
    if weight.ndim != 1 or len(signature(module.forward).parameters) != 1:
        return None
    x = torch.linspace(-2.0, 3.0, 2 * len(weight), device=weight.device, dtype=weight.dtype).reshape(1, 2, -1)
    with torch.no_grad(), suppress(Exception):  # whatever it is that does not take this x
        return eps if torch.allclose(module(x), rms_norm(x, weight.shape, weight, eps), atol=1e-5, rtol=1e-4) else None
    return None
