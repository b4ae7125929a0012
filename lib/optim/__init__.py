"""Optimizers, learning-rate schedules and the exponential moving average of weights.

Data and models are unknown here. Imported by lib/memory, train and scripts.
"""
