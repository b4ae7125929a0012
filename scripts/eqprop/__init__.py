"""Experiments on equilibrium propagation: what each shows is in docs/eqprop.md."""
