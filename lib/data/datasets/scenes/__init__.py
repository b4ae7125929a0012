"""The synthetic set scenes."""
