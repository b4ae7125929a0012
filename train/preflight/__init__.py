"""`make preflight`: checks of a configuration before a long run.

Nothing here is part of a run. Imported by the command line of train.
"""
