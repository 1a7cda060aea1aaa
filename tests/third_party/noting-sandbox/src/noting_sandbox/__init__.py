"""A sandbox backend that notes every command."""
