"""Training: the loop, what it is built of, the tasks, planning and preflight.

Nothing here is imported by lib or models. Imported by scripts.
"""
