"""Language modelling: the next token at every position."""
