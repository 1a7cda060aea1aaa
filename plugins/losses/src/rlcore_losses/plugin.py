"""What rlcore-losses offers; imports nothing heavy."""
