"""Sentences with a label."""
