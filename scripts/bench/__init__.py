"""Benchmarks: throughput, mixers, what memory options cost, and comparisons with published code."""
