"""The conformance kit: what a plugin's own tests subclass or call to show that it keeps its contract."""
