"""Benchmarks: throughput, what memory options cost, and comparisons with published code."""
