"""Run directories: their files and status, checkpoints, storage, metrics, sinks, console and plots.

Nothing here knows how a step is made. Imported by train and scripts.
"""
