"""Daytona sandboxes for rlcore."""
