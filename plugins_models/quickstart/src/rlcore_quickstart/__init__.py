"""The embedded recipe of rlcore: a 135M model learns to use a shell on a laptop."""
