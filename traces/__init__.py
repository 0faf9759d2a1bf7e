"""Request traces: read, describe, generate."""
