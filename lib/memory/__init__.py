"""How much memory training needs: predicted without a device, measured with one."""

from lib.memory.live import Trace
from lib.memory.predict import predict_peak

__all__ = ["Trace", "predict_peak"]
