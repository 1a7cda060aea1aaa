"""The producer: sessions, episodes, the scheduler and the buffer."""
