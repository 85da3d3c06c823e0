"""The models somebody still trains from, with reference counts."""

from dataclasses import dataclass, field

from fedecho.core.types import GlobalModel


@dataclass(slots=True)
class Versions:
    """Keeps a model while it is the current one or a dispatch from it is open: at most Mc + 1 are alive."""

    current: GlobalModel
    models: dict[int, GlobalModel] = field(default_factory=dict)
    references: dict[int, int] = field(default_factory=dict)
    peak_alive: int = 1

    def acquire(self) -> GlobalModel:
        """The current model, for one more dispatch."""
        version = self.current.version
        self.models[version] = self.current
        self.references[version] = self.references.get(version, 0) + 1
        return self.current

    def release(self, version: int) -> GlobalModel:
        """One dispatch from ``version`` has ended; the model is forgotten with the last of them."""
        model = self.models[version]
        self.references[version] -= 1
        if self.references[version] == 0:
            del self.references[version], self.models[version]
        return model

    def publish(self, model: GlobalModel) -> None:
        self.current = model
        self.peak_alive = max(self.peak_alive, self.num_alive)

    @property
    def num_alive(self) -> int:
        return len(self.models) + (self.current.version not in self.models)
