"""The same federated job on other simulators: who is how fast."""
