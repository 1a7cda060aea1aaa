"""What rlcore-engine offers; imports nothing heavy."""
