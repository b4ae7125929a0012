"""Conversations for the fine-tuning of language models."""
