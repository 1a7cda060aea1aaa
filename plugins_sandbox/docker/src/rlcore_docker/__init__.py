"""Docker sandboxes for rlcore."""
