"""What a device and a model cost: memory and step time."""
