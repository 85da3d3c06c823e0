"""LoRA adapters through peft, and a cheaper forward pass for training adapters in low precision."""

import warnings
from collections import Counter
from contextlib import suppress
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from fedecho.tasks.text.pretrained import library

ALL_LINEAR = "all-linear"


def with_lora(model: nn.Module, rank: int, alpha: float, targets: str) -> nn.Module:
    """Add low-rank adapters and train only them. ``targets`` is all-linear or comma-separated layer names."""
    peft = library("peft")
    names = targets if targets == ALL_LINEAR else [name.strip() for name in targets.split(",")]
    if isinstance(names, list):
        _check_targets(names, model)
    try:
        config = peft.LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=names, bias="none")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")  # ``merged`` unties them
            adapted: nn.Module = peft.inject_adapter_in_model(config, model)
    except ValueError as error:
        raise ValueError(f"task.lora_targets {targets!r} does not fit this model: {str(error).splitlines()[0][:160]}") from None
    for name, param in adapted.named_parameters():
        param.requires_grad_("lora_" in name)
    return adapted


def merged(model: Any) -> nn.Module:
    """Merge the adapters into the weights of their layers. Consumes ``model``.

    An embedding and a head that share weights are untied if one of them is adapted, because only that one has changed.
    """
    num_uses = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
    adapted = [
        (name, layer) for name, layer in model.named_modules() if hasattr(layer, "merge") and hasattr(layer, "base_layer")
    ]
    for name, layer in adapted:
        if num_uses[id(layer.base_layer.weight)] > 1:
            layer.base_layer.weight = nn.Parameter(layer.base_layer.weight.detach().clone())
            for config in (model.config, model.config.get_text_config()):
                config.tie_word_embeddings = False
        layer.merge()
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, layer.base_layer)
    whole: nn.Module = model
    return whole


def _check_targets(names: list[str], model: nn.Module) -> None:
    """Raise if any name matches no layer; peft accepts names as long as one of them matches."""
    paths = [path for path, _ in model.named_modules()]
    linear = sorted({path.rpartition(".")[2] for path, module in model.named_modules() if isinstance(module, nn.Linear)})
    for name in names:
        if not any(path == name or path.endswith(f".{name}") for path in paths):
            choices = f"its linear layers are {', '.join(linear)} ({ALL_LINEAR} selects all)"
            raise ValueError(f"task.lora_targets: this model has no layer {name!r}; {choices}")


EPS = ("variance_epsilon", "eps", "epsilon")
"""Attribute names of the epsilon in models' RMSNorm layers."""


class FusedRMSNorm(nn.Module):
    """Replaces a model's RMSNorm by torch's, which computes in float32 and is a single kernel where available."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        # Under autocast the output would be float32 as well.
        with torch.autocast(x.device.type, enabled=False):
            return rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def lean(model: nn.Module) -> nn.Module:
    """Make a freshly loaded model cheaper to run under autocast. Changes it in place."""
    whole: Any = model
    head = whole.get_output_embeddings()  # the logit bank applies it without autocast
    for name, module in list(model.named_modules()):
        if hasattr(module, "lora_A") and module is not head:
            cast: Any = module
            cast.cast_input_dtype_enabled = False  # autocast converts the adapters' weights to the input's precision
        elif (eps := _eps_of(module)) is not None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, FusedRMSNorm(module.weight, eps))
    return model


def _eps_of(module: nn.Module) -> float | None:
    """Return the epsilon of a plain RMSNorm, else None. Tested numerically: some variants multiply by 1 + weight or a gate."""
    weight, eps = getattr(module, "weight", None), next((getattr(module, name) for name in EPS if hasattr(module, name)), None)
    if "RMSNorm" not in type(module).__name__ or not isinstance(weight, nn.Parameter) or not isinstance(eps, float):
        return None
    if weight.ndim != 1 or len(signature(module.forward).parameters) != 1:
        return None
    x = torch.linspace(-2.0, 3.0, 2 * len(weight), device=weight.device, dtype=weight.dtype).reshape(1, 2, -1)
    with torch.no_grad(), suppress(Exception):  # a module that does not accept this input is not a plain RMSNorm
        return eps if torch.allclose(module(x), rms_norm(x, weight.shape, weight, eps), atol=1e-5, rtol=1e-4) else None
    return None
