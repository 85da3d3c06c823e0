"""The theorem's rates on a problem whose constants are known."""
