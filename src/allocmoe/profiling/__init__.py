"""Measures a model: the sensitivity of its layers, the thresholds of its token rules."""
