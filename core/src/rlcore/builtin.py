"""What the core itself offers, registered like any plugin."""
