"""Memory of a training step: predicted without a device, measured with one.

It is handed a step as a callable and knows neither data nor the loop. Imported by lib, models and train.
"""

from lib.memory.live import Trace
from lib.memory.predict import predict_peak

__all__ = ["Trace", "predict_peak"]
