"""A ratio that is bent instead of clipped."""
