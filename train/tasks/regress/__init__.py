"""Regression: one or more numbers per sample."""
