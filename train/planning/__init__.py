"""`make plan` and `make probe`: from a requested configuration to the plan of a run.

The real step is traced here for memory estimates; nothing here trains a run. Imported by train and scripts.
"""
