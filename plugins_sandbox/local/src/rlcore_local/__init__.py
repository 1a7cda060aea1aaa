"""Local sandboxes for rlcore on bubblewrap."""
