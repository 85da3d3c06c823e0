"""Text tasks, with their readers, models and batching."""
