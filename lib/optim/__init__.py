"""Optimizers, learning-rate schedules and the exponential moving average of weights.

Nothing here knows data or models by name. Imported by lib/memory, train and scripts.
"""
