"""Files, memory-mapped rows and checkpoints."""
