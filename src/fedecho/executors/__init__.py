"""Where jobs are computed."""
