"""Devices: what this machine has, and the backend that a run of it uses.

Here alone is code for one kind of device (CUDA, ROCm, MPS, XLA, TPU). Nothing here knows data,
models or a training loop. Imported by lib, train and scripts.
"""
