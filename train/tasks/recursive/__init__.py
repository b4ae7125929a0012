"""Deep supervision of a recursive model (TRM), with a carry between steps."""
