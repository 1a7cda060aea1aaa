"""Modal sandboxes for rlcore."""
