"""The cheapest deployment that meets a service-level objective, found with few simulations."""
