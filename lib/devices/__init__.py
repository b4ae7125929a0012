"""Devices: hardware of this node, and the backend that a run on it uses.

The only package with code for one kind of device (CUDA, ROCm, MPS, XLA, TPU). Nothing here knows data, models
or a training loop. Imported by lib, train and scripts.
"""
