"""Experiments and their execution: configuration, simulation, run folder, record and summary."""
