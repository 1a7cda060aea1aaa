"""What rlcore-local offers; imports nothing heavy."""
