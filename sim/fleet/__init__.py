"""A fleet that changes while it serves: limits, failures, drains, autoscaling, pools, a network before it."""
