"""What the library costs beyond training, against everything that can grow."""
