"""Classification: one label per sample."""
