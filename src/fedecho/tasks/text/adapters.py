"""LoRA adapters by peft, and a leaner forward pass for models that train adapters in low precision."""

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


def check_lora(rank: int | None, alpha: float | None, targets: str) -> None:
    if rank is None and (alpha is not None or targets != ALL_LINEAR):
        raise ValueError("task.lora_alpha and task.lora_targets are of adapters: set task.lora_rank too, or leave them out")


def with_lora(model: nn.Module, rank: int, alpha: float, targets: str) -> nn.Module:
    """The same model with low-rank adapters, which alone are trained. ``targets``: all-linear, or names separated by commas."""
    peft = library("peft")
    names = targets if targets == ALL_LINEAR else [name.strip() for name in targets.split(",")]
    if isinstance(names, list):
        _check(names, model)
    try:
        config = peft.LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=names, bias="none")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")  # ``merged`` sees to it
            adapted: nn.Module = peft.inject_adapter_in_model(config, model)
    except ValueError as error:
        raise ValueError(f"task.lora_targets {targets!r} does not fit this model: {str(error).splitlines()[0][:160]}") from None
    for name, param in adapted.named_parameters():
        param.requires_grad_("lora_" in name)
    return adapted


def merged(model: Any) -> nn.Module:
    """The same function without adapters: each adapted layer's weights with what its adapters add. ``model`` is spent.

    An embedding and a head that share their weights part where one of them is adapted: what it learnt is not the other's.
    """
    times = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
    adapted = [
        (name, layer) for name, layer in model.named_modules() if hasattr(layer, "merge") and hasattr(layer, "base_layer")
    ]
    for name, layer in adapted:
        if times[id(layer.base_layer.weight)] > 1:
            layer.base_layer.weight = nn.Parameter(layer.base_layer.weight.detach().clone())
            for config in (model.config, model.config.get_text_config()):
                config.tie_word_embeddings = False
        layer.merge()
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, layer.base_layer)
    whole: nn.Module = model
    return whole


def _check(names: list[str], model: nn.Module) -> None:
    """peft is content if one of the names fits, and the record would speak of all."""
    paths = [path for path, _ in model.named_modules()]
    linear = sorted({path.rpartition(".")[2] for path, module in model.named_modules() if isinstance(module, nn.Linear)})
    for name in names:
        if not any(path == name or path.endswith(f".{name}") for path in paths):
            known = f"its linear ones are {', '.join(linear)} ({ALL_LINEAR} means all)"
            raise ValueError(f"task.lora_targets: this model has no layer {name!r}; {known}")


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
