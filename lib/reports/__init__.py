"""Reports: HTML pages of runs, each one file that needs no network."""
