"""Answers of conversations."""
