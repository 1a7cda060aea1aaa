"""Harbor / terminal-bench-2 task folders, the terminal agent loop and its grader for rlcore."""
