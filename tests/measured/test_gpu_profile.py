"""The reading of a profiler's trace, on one written by hand."""

from benchmarks.gpu_profile import weighed


def event(name: str, us: float, blocks: float, cat: str = "kernel") -> dict[str, object]:
    return {"cat": cat, "name": name, "dur": us, "args": {"blocks per SM": blocks}}


def test_kernels_are_told_apart_and_weighed_by_the_share_of_the_card() -> None:
    trace = [
        event("sm90_xmma_fprop_implicit_gemm_bf16", 10.0, 0.5),
        event("cudnn_infer_conv", 4.0, 3.0),
        event("triton_red_fused_native_batch_norm_convolution_backward_3", 6.0, 0.25),
        event("memcpy", 100.0, 1.0, cat="gpu_memcpy"),
    ]
    assert weighed(trace) == {"convolutions": (2, 14.0, 9.0), "BatchNorm, ReLU, update": (1, 6.0, 1.5)}
