"""Distributed training: launching and supervising processes, rendezvous, sharded parameters, job files.

Nothing here knows data or models. Imported by train and scripts.
"""
