"""Studies: experiment files in YAML, and sweeps over the configurations that they describe."""
