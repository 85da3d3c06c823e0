import importlib
import warnings
from pathlib import Path

import pytest
import torch
from small_cifar import write_noise


@pytest.fixture(scope="session", autouse=True)
def inductor() -> None:
    """torch 2.11's compiler warns of torch's own code when it is imported; what it says of ours is still an error."""
    if torch.cuda.is_available():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("torch._inductor.compile_fx")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_noise(tmp_path_factory.mktemp("cifar"))
