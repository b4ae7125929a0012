"""Texts with labels, or whose words have tags."""
