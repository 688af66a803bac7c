"""Approximate caching: the states that pictures keep, and how later pictures of the same owner recall them."""
