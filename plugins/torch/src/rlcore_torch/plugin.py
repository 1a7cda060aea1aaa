"""What rlcore-torch offers; imports nothing heavy."""
