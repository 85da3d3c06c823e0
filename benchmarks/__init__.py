"""Ratios, measured in one run against a bare training loop. Absolute times say little about another machine."""
