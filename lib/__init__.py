"""Anneal's library: configuration, planning, data and the parts of a training run."""
