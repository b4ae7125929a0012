"""Run directories: files and status, checkpoints, storage, metrics, sinks, console and plots.

Independent of the training loop. Imported by train and scripts.
"""
