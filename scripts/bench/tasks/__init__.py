"""Comparisons in the place of a bare loop: NAME.py is that of the task NAME."""
