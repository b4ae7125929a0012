"""Sweeps: experiment files, the runs that they describe, and the search over them.

Each run is a process of its own; nothing here knows a step. Imported by lib/scaling and scripts.
"""
