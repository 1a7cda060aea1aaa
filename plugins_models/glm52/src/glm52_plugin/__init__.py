"""GLM-5.2 744B-A40B on terminal-bench-2 as a recipe of rlcore."""
