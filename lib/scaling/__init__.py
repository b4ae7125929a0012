"""Scaling laws: what is planned, run, fitted, doubted and drawn. The fitter needs numpy alone."""
