"""Several processes: launching and supervising them, rendezvous, sharded parameters, job files.

Nothing here knows data or models. Imported by train and scripts.
"""
