"""A bridge between two frozen language models (LatentWire), and their pretraining."""
