"""The same federated job on other simulators, timed."""
