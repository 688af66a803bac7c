"""The arena: is the policy `default` anywhere worse than those before it? Every contest is a load, a machine and some
metrics; all policies serve the same arrivals, seed by seed, so that their figures are compared in pairs.
"""
