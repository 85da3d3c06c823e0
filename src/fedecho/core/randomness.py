"""Addressed randomness: every draw is derived from the seed and its own address, never from a sequence."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import torch

Address = int | str


def derive(seed: int, *address: Address) -> int:
    """The 63-bit number that lives at ``address`` under ``seed``.

    >>> derive(0, "select", 1) == derive(0, "select", 1)
    True
    >>> derive(0, "select", 1) == derive(0, "select", "1")
    False
    """
    if len(address) == 2:
        name, number = address
        if type(name) is str and type(number) is int and type(seed) is int:  # nearly all draws: half the time, the same bytes
            digest = _begun(seed, name).copy()
            digest.update(b"%d)" % number)
            return int.from_bytes(digest.digest(), "big") >> 1
    plain = (int(seed), *(part if isinstance(part, str) else int(part) for part in address))
    return int.from_bytes(blake2b(repr(plain).encode(), digest_size=8).digest(), "big") >> 1


@lru_cache(maxsize=256)
def _begun(seed: int, name: str) -> blake2b:
    """The hash of an address up to its last number."""
    return blake2b(f"({seed}, {name!r}, ".encode(), digest_size=8)


def uniform(seed: int, *address: Address) -> float:
    """One draw from U[0, 1), without building a generator: some two microseconds."""
    return float(derive(seed, *address) >> 10) / float(1 << 53)


def below(bound: int, seed: int, *address: Address) -> int:
    """One draw from {0, ..., bound - 1}; the bias of the modulus is under bound / 2**63."""
    return derive(seed, *address) % bound


def numpy_rng(seed: int, *address: Address) -> np.random.Generator:
    """A numpy generator for many draws at one address."""
    return np.random.Generator(np.random.PCG64(derive(seed, *address)))


def torch_rng(seed: int, *address: Address) -> torch.Generator:
    """A CPU torch generator for many draws at one address."""
    return torch.Generator().manual_seed(derive(seed, *address))


@contextmanager
def rng_kept(device: torch.device) -> Iterator[list[torch.Generator]]:
    """Whatever is drawn from torch's own generators inside, outside nothing moves."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    before = [generator.get_state() for generator in generators]
    try:
        yield generators
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


@contextmanager
def global_rng(device: torch.device, seed: int, *address: Address) -> Iterator[None]:
    """What draws from torch's own generators inside (dropout, initialisation) draws from this address; outside, nothing moves.

    By hand, because ``torch.manual_seed`` takes a millisecond: as long as a step of a small network.
    """
    with rng_kept(device) as generators:
        for generator in generators:
            generator.manual_seed(derive(seed, *address))
        yield
