"""Straggling clients on a virtual clock."""
