"""Entry points of make targets and of CI, benchmarks, and what those alone use.

Nothing imports from here.
"""
