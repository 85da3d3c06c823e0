"""The state machine every clock and every wire shares. Imports nothing else of this package."""
