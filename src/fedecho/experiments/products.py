"""Does this GPU multiply matrices? Milliseconds before hours of training.

Processes that NVIDIA MPS held to 52 of an H200's 132 multiprocessors computed NaN as the loss of every BERT and MPNet in bf16,
without an error (torch 2.11.0). Their runs ended as diverged, and blamed the learning rate.
"""

import os

import torch

SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
SHAPES = ((512, 768, 768), (512, 768, 3072))
"""Of BERT-base, batch 8: rows, and a layer's inputs and outputs."""
MOST_AWAY = 0.02
"""Of the product's norm: what bf16 rounds off is some .003."""


def wrong_products(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> str:
    """What is wrong with products on this device, in a line, or nothing."""
    for rows, into, out in SHAPES:
        left = torch.linspace(-1.0, 1.0, rows * into).sin().view(rows, into).to(dtype)
        right = torch.linspace(-2.0, 3.0, into * out).cos().view(out, into).to(dtype)
        wanted = left.float() @ right.float().T
        away = (torch.nn.functional.linear(left.to(device), right.to(device)).float().cpu() - wanted).norm() / wanted.norm()
        if not away < MOST_AWAY:  # NaN is not
            share = f"; {SHARE} is {os.environ[SHARE]}, try it without" if SHARE in os.environ else ""
            what = f"{rows} x {into} times {into} x {out} in {str(dtype).removeprefix('torch.')}"
            return f"a product of {what} came out wrong on it (off by {float(away):.2g}){share}"
    return ""
