"""Executors: they train clients in this process, in worker processes, or on a Ray cluster."""
