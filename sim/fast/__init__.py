"""The same runs as the step-by-step path, byte for byte, from compiled code."""
