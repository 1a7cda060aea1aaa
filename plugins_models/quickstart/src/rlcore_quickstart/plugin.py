"""What rlcore-quickstart offers; imports nothing heavy."""
