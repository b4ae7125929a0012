"""Checks of plans and predictions on a real GPU; see scripts/gpu_check.sh."""
