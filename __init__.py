"""vsim: what will vLLM's tails, throughput, KV cache and bill be if I change X?"""

__version__ = "0.1.0"
