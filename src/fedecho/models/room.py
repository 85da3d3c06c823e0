"""Keys and values of a generation in memory that is taken once.

transformers' own cache makes all of them anew at every token. With a thousand answers at once these are gigabytes, each time a
little larger than what was freed before, so that little of it can be used again.
"""

from dataclasses import dataclass
from inspect import signature
from typing import Any
from weakref import proxy

from torch import Tensor

from fedecho.models.pretrained import library


@dataclass
class Room:
    """Takes the place of ``update`` in one layer of a cache that grows: the same answers.

    It knows its layer weakly, so that both go, and gigabytes with them, as soon as nobody uses the cache.
    """

    layer: Any
    length: int
    keys: Tensor | None = None
    values: Tensor | None = None
    used: int = 0

    def __call__(self, key_states: Tensor, value_states: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            self.layer.lazy_initialization(key_states, value_states)
            self.keys, self.values = self._room_for(key_states), self._room_for(value_states)
        end = self.used + key_states.shape[-2]
        self.keys[..., self.used : end, :] = key_states
        self.values[..., self.used : end, :] = value_states
        self.used = end
        self.layer.keys, self.layer.values = self.keys[..., :end, :], self.values[..., :end, :]
        return self.layer.keys, self.layer.values

    def _room_for(self, states: Tensor) -> Tensor:
        return states.new_empty(*states.shape[:-2], self.length, states.shape[-1])


def cache_with_room(model: Any, length: int) -> Any:
    """A cache for one generation of at most ``length`` tokens; None, which is the model's own, if that is not of the plain kind."""
    transformers, plain = library("transformers"), library("transformers.cache_utils").DynamicLayer
    cache = transformers.DynamicCache(config=model.config.get_text_config(decoder=True))
    if "past_key_values" not in signature(model.forward).parameters or {type(layer) for layer in cache.layers} != {plain}:
        return None
    for layer in cache.layers:
        layer.update = Room(proxy(layer), length)
    return cache
