"""Anneal's library: configuration, planning, data and the parts of a training run."""

import os

# torch must not load packages for devices by itself: `lib/devices` decides when.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
