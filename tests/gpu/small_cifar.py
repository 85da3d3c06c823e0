"""A small CIFAR task in the official files, as the tests of the captured program use it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from official_files import write_cifar10

from fedecho import Experiment, load
from fedecho.gpu.capture import Precision

EXACT = Precision(dtype=torch.float32, deterministic=True, compiled=False)
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]


def write_noise(folder: Path) -> Path:
    """A few hundred images, plain noise: flat pictures would make BatchNorm's gradients ill-conditioned in float32."""
    rng = np.random.default_rng(0)

    def noise(num: int) -> tuple[np.ndarray, np.ndarray]:
        return rng.integers(0, 256, (num, 32, 32, 3)).astype(np.uint8), rng.integers(0, 10, num)

    write_cifar10(folder, noise(300), noise(60))
    np.save(folder / "cifar100-32.npy", noise(40)[0])
    return folder


def experiment(data: Path, algorithm: str, *settings: str, versions: int = 6) -> Experiment:
    """A small ResNet; clients of some ten images in batches of 7, so that every other batch is a partial one.

    Weight decay and clipping are strong, so that a program that forgot them would be far off; Adam would forget a scale, if eps
    were small.
    """
    small = ["task.num_clients=30", "task.width=4", "task.num_unlabeled=20", f"task.data_dir={data}", "local.batch_size=7"]
    small += ["task.partition.alpha=100.0", "local.client_lr=0.001", "local.epochs=1", "local.weight_decay=3.0"]
    small += ["concurrency=5"] if algorithm != "fedasync" else ["concurrency=3"]
    if algorithm.startswith("fedecho"):
        small += ["algorithm.distiller.batch_size=10", "algorithm.distiller.distill_lr=1e-4"]
        small += ["algorithm.distiller.clip_norm=0.05", "algorithm.distiller.eps=0.01"]
    return load("cifar10", algorithm=algorithm, versions=versions, settings=[*small, *settings])
