"""A milder truncated importance sampling."""
