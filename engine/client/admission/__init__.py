"""Admission: which requests are let in, by free places and by predicted time."""
