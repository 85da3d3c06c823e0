"""The kernels compiled for Hopper and Ampere cards, which needs no GPU: what the interpreter takes, the compiler may refuse."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs Triton, which comes with a torch for CUDA")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from fedecho.gpu import channel_kernels as kernels  # noqa: E402
from fedecho.gpu.channel_ops import cut  # noqa: E402

pytestmark = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3), reason="before 3.3 Triton's compiler is called in another way"
)
POINTERS = {"x": "*bf16", "grad": "*bf16", "extra": "*bf16", "y": "*bf16", "d_x": "*bf16", "num_rows": "i32"}
"""All others are vectors in float32."""
WORK = [
    (kernels._sums, {}),
    (kernels._gradient_sums, {"RECTIFY": True}),
    (kernels._normalised, {"RECTIFY": True, "EXTRA": True}),
    (kernels._input_gradient, {"RECTIFY": True}),
]


def compiled(kernel: Any, constants: dict[str, int], capability: int) -> Any:
    names = list(inspect.signature(kernel.fn).parameters)
    types = {name: "constexpr" if name.isupper() else POINTERS.get(name, "*fp32") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in names if types[name].startswith("*")}
    known = {(names.index(name),): constants[name] for name in names if name.isupper()}
    source = ASTSource(kernel, types, known, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": kernels.WARPS})


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("channels", "side"), [(64, 32), (512, 4)])
@pytest.mark.parametrize(("kernel", "switches"), WORK, ids=lambda each: getattr(each, "__name__", ""))
def test_a_kernel_compiles_and_reads_sixteen_bytes_at_once(
    kernel: Any,
    switches: dict[str, bool],
    channels: int,
    side: int,
    capability: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    _, tiles, rows = cut(torch.empty(50, channels, side, side, device="meta"))
    sizes = {"IMAGE": side * side, "TILES": tiles, "ROWS": rows, "C": channels, **switches}
    program = compiled(kernel, sizes, capability)
    assert program.asm["cubin"]
    assert ".v4.b32" in program.asm["ptx"]
    assert "max.f32" not in program.asm["ptx"], "which makes 0 of NaN"
