"""Launchers of rlcore runs: inline, Slurm, Ray."""
