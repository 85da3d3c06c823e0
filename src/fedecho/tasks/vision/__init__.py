"""Image tasks, with their readers and networks."""
