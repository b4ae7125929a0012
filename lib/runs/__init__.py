"""Run directories: files and status, checkpoints, storage, metrics, sinks and console.

Independent of the training loop. Imported by train and scripts.
"""
