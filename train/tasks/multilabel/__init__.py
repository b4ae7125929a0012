"""Task: any number of labels per sample."""
