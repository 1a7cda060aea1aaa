"""The run directory: everything that a run leaves behind."""
