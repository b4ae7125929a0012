"""Checks on a real GPU of what is planned without one; see scripts/gpu_check.sh."""
