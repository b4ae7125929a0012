"""Modules and functions of neural networks that torch lacks, or that must not depend on the split.

Nothing here knows configuration, data or devices by name. Imported by lib, models and train.
"""

IGNORED = -100  # a target that is not there and counts nothing; cross_entropy of torch ignores it
