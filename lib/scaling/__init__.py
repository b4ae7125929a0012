"""Scaling laws: sweeps of model sizes, fits and the judgement of them.

The fits need numpy alone; training is a process of its own. Imported by make report and by scripts.
"""

PLAN = "sweep.json"  # in the folder of a sweep: its runs by name, with hashes
