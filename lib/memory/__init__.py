"""Memory of a training step: predicted without a device, or measured on one.

The step is passed as a callable; data and the training loop are unknown here. Imported by lib, models and
train.
"""

from lib.memory.live import Trace
from lib.memory.predict import predict_peak

__all__ = ["Trace", "predict_peak"]
