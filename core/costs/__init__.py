"""What work costs: the cost model, what engines report of their load, and forecasts made from it."""
