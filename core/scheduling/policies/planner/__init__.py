"""The policy default: one planner, from lanes and one forecast."""
