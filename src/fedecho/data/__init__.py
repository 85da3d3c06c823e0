"""Readers of data files, and the ways to split data over clients."""
