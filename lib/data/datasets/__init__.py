"""Data sets, one module or folder each, with what fetches, generates and opens them.

Nothing here knows loaders, models or devices. Imported by lib/data and train.
"""
