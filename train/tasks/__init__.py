"""Tasks: what a model is trained to do, one module or folder each.

A task knows its batches, loss and metrics; nothing here knows run directories. Imported by train.
"""
