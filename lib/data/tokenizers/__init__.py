"""Tokenizers: text to token ids and back.

Nothing here knows data sets or models. Imported by lib/data and train.
"""
