"""Real vLLM in, cost models and error bars out."""
