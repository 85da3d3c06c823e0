"""A leaner language model against the same model of transformers and peft."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, rms_norm

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

from fedecho.tasks.text import adapters as lean_file  # noqa: E402
from fedecho.tasks.text.adapters import (  # noqa: E402
    FusedRMSNorm,
    lean,
    with_lora,
)

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES |= {"intermediate_size": 32, "head_dim": 8}
IDS = torch.arange(24).reshape(2, 12) % 40


def adapted(kind: str = "Llama") -> nn.Module:
    """With norms and adapters that have been trained, so that none of them is the identity."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES)
    model = with_lora(getattr(transformers, f"{kind}ForCausalLM")(config), 2, 4.0, "q_proj,v_proj")
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" in name or "lora_B" in name:
                param.add_(0.3 * torch.randn_like(param))
    return model


def found(model: Any) -> tuple[Tensor, list[Tensor]]:
    """The logits, and the adapters' gradients."""
    logits = model(IDS).logits
    loss = cross_entropy(logits.float().flatten(0, 1), IDS.flatten())
    return logits, list(torch.autograd.grad(loss, [param for param in model.parameters() if param.requires_grad]))


def in_bf16(model: nn.Module) -> nn.Module:
    for param in model.parameters():
        param.data = param.data if param.requires_grad else param.data.bfloat16()
    return model


def num_fused(model: nn.Module) -> int:
    return sum(isinstance(module, FusedRMSNorm) for module in model.modules())


def test_a_fused_norm_is_the_formula() -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(3, 16)).astype(np.float32), rng.normal(size=16).astype(np.float32)
    ours = FusedRMSNorm(nn.Parameter(torch.from_numpy(weight)), 1e-5)(torch.from_numpy(x))
    np.testing.assert_allclose(ours.detach(), weight * x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5), rtol=2e-6)


@pytest.mark.parametrize(("kind", "num"), [("Llama", 5), ("Qwen2", 5), ("Mistral", 5), ("Qwen3", 9)])
def test_in_float32_nothing_changes_but_rounding(kind: str, num: int) -> None:
    """Two norms in each layer and the last; Qwen3 has two more in each layer, of queries and keys."""
    plain = adapted(kind)
    ours = lean(copy.deepcopy(plain))
    assert num_fused(ours) == num
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in plain.named_parameters()]
    logits, grads = found(ours)
    expected, expected_grads = found(plain)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    for grad, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, wanted, atol=1e-6, rtol=1e-4)


def test_without_casts_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to float32 and back down again is no change, so to leave it out is none either."""
    monkeypatch.setattr(lean_file, "EPS", ())
    plain, ours = in_bf16(adapted()), in_bf16(lean(adapted()))
    assert num_fused(ours) == 0
    with torch.autocast("cpu", torch.bfloat16):
        (logits, grads), (expected, expected_grads) = found(ours), found(plain)
    assert torch.equal(logits, expected)
    assert all(torch.equal(grad, wanted) for grad, wanted in zip(grads, expected_grads, strict=True))


def test_in_bf16_it_is_as_near_to_float32_as_the_plain_model() -> None:
    exact = found(adapted())
    with torch.autocast("cpu", torch.bfloat16):
        plain, ours = found(in_bf16(adapted())), found(in_bf16(lean(adapted())))
    assert ours[0].dtype == plain[0].dtype == torch.bfloat16

    def off(one: tuple[Tensor, list[Tensor]]) -> float:
        wrong = torch.cat([(a - b).flatten() for a, b in zip(one[1], exact[1], strict=True)])
        return float(wrong.norm() / torch.cat([grad.flatten() for grad in exact[1]]).norm())

    assert off(ours) < 1.5 * off(plain)
    assert max(off(ours), off(plain)) < 0.05


def test_a_norm_of_another_kind_is_left_alone() -> None:
    """Gemma multiplies by 1 + weight."""
    model = lean(adapted("Gemma"))
    assert num_fused(model) == 0
    assert found(model)[0].isfinite().all()


class GatedRMSNorm(nn.Module):
    def __init__(self, optional: bool) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(4)), 1e-6
        self.forward = self._optional if optional else self._needed  # type: ignore[method-assign]

    def _needed(self, x: Tensor, gate: Tensor) -> Tensor:
        return rms_norm(x * gate, (4,), self.weight, self.eps)

    def _optional(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return self._needed(x, torch.ones(()) if gate is None else gate)


class OddRMSNorm(GatedRMSNorm):
    def _needed(self, x: Tensor) -> Tensor:  # type: ignore[override]
        raise RuntimeError("only of three dimensions and a half")


@pytest.mark.parametrize("norm", [GatedRMSNorm(False), GatedRMSNorm(True), OddRMSNorm(False)], ids=["gate", "no gate", "odd"])
def test_a_norm_with_a_gate_or_a_will_of_its_own_is_left_alone(norm: nn.Module) -> None:
    model = adapted()
    model.add_module("more", norm)
    assert lean(model).get_submodule("more") is norm


def test_an_adapted_head_works_without_autocast_as_a_bank_uses_it() -> None:
    torch.manual_seed(0)
    model: Any = with_lora(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), 2, 4.0, "q_proj,lm_head")
    model = in_bf16(lean(model))
    head = model.get_output_embeddings()
    assert head(torch.randn(3, 16, dtype=torch.bfloat16)).shape == (3, 40)
