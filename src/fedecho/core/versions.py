"""The models somebody still trains from, with reference counts."""

from dataclasses import dataclass, field

from fedecho.core.algorithm import tensors_of, write_counts
from fedecho.core.types import GlobalModel


@dataclass(slots=True)
class Versions:
    """Keeps a model while it is the current one or a dispatch from it is open: at most Mc + 1 are alive."""

    current: GlobalModel
    models: dict[int, GlobalModel] = field(default_factory=dict)
    references: dict[int, int] = field(default_factory=dict)
    peak_alive: int = 1
    _written: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """How often the tensors of each model had been written to when it was first given out."""

    def __post_init__(self) -> None:
        self._written.update({version: write_counts(tensors_of(model)) for version, model in self.models.items()})

    def acquire(self) -> GlobalModel:
        """The current model, for one more dispatch."""
        version = self.current.version
        if self.models.get(version) is not self.current:
            self.models[version] = self.current
            self._written[version] = write_counts(tensors_of(self.current))
        self.references[version] = self.references.get(version, 0) + 1
        return self.current

    def release(self, version: int) -> GlobalModel:
        """One dispatch from ``version`` has ended; the model is forgotten with the last of them."""
        model = self.models[version]
        if write_counts(tensors_of(model)) != self._written[version]:
            raise ValueError(
                f"the model of version {version} was changed in place while clients trained from it: "
                "a state that writes to a tensor must keep a clone of what was published"
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
