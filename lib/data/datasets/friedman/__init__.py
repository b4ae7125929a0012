"""The generated table of Friedman 1991."""
