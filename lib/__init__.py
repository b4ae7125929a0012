"""Anneal's library: configuration, planning, data and the parts of a training run."""

import os

# torch is not to load packages for devices by itself: `lib/devices/tpu.py` says when torch_tpu may be.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
