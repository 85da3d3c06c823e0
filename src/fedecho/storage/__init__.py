"""Files, memory-mapped client memory and checkpoints."""
