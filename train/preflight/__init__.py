"""`make preflight`: checks that a configuration trains as it says, before it trains for long.

Nothing here is part of a run. Imported by the command line of train.
"""
