"""Texts that are read as they are: Python's library, Shakespeare, WikiText, files, a Markov chain."""
