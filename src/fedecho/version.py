"""The version, read by code that runs without being installed too."""

__version__ = "0.1.0"
