"""Texts whose words have tags."""
