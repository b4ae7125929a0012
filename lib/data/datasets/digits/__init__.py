"""The synthetic set digits."""
