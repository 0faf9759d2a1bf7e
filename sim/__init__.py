"""The simulated engine: vLLM's decisions on a simulated clock."""
