"""Sinks of the rows of metrics.jsonl: TensorBoard event files, Weights & Biases, trackio.

Each follows the file and is independent of the training loop. Imported by train.
"""
