"""Predicting how long work takes: the cost model, the load reports of engines, and forecasts made from them."""
