"""MNIST and what copies its layout."""
