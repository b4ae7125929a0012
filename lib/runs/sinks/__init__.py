"""Sinks of the rows of metrics.jsonl: event files of TensorBoard, Weights & Biases, trackio.

Each follows the file and knows nothing of the loop. Imported by train.
"""
