"""A table of the user: CSV or npz."""
