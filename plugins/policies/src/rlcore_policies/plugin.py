"""What rlcore-policies offers; imports nothing heavy."""
