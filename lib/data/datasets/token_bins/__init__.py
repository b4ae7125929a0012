"""Files of tokens that were made elsewhere."""
