"""Neural-network modules and functions that torch lacks, or that must not depend on the batch split.

Configuration, data and devices are unknown here. Imported by lib, models and train.
"""

IGNORED = -100  # target index that torch's cross_entropy ignores
