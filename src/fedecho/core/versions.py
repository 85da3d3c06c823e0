"""Reference-counted storage of the model versions that clients still train from."""

from dataclasses import dataclass, field

from fedecho.core.algorithm import tensors_of, write_counts
from fedecho.core.types import GlobalModel


@dataclass(slots=True)
class Versions:
    """Keeps a model while it is current or has an open dispatch. At most Mc + 1 are alive."""

    current: GlobalModel
    models: dict[int, GlobalModel] = field(default_factory=dict)
    references: dict[int, int] = field(default_factory=dict)
    peak_alive: int = 1
    _written: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The write counts of each model's tensors when it was first dispatched."""

    def __post_init__(self) -> None:
        self._written.update({version: write_counts(tensors_of(model)) for version, model in self.models.items()})

    def acquire(self) -> GlobalModel:
        """Return the current model and count one more dispatch of it."""
        version = self.current.version
        if self.models.get(version) is not self.current:
            self.models[version] = self.current
            self._written[version] = write_counts(tensors_of(self.current))
        self.references[version] = self.references.get(version, 0) + 1
        return self.current

    def release(self, version: int) -> GlobalModel:
        """End one dispatch from ``version`` and drop the model with its last one. Return the model."""
        model = self.models[version]
        if write_counts(tensors_of(model)) != self._written[version]:
            raise ValueError(
                f"the model of version {version} was changed in place while clients trained from it: "
                "an algorithm's state must not write to tensors it has published; publish a clone"
            )
        self.references[version] -= 1
        if self.references[version] == 0:
            del self.references[version], self.models[version], self._written[version]
        return model

    def publish(self, model: GlobalModel) -> None:
        self.current = model
        self.peak_alive = max(self.peak_alive, self.num_alive)

    @property
    def num_alive(self) -> int:
        return len(self.models) + (self.current.version not in self.models)
