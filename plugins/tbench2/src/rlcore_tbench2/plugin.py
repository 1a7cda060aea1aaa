"""What rlcore-tbench2 offers; imports nothing heavy."""
