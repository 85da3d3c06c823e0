from pathlib import Path

import pytest
from small_cifar import write_noise


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_noise(tmp_path_factory.mktemp("cifar"))
