"""Planning: (Config, Hardware, ModelFacts) -> Plan, with a reason for every value.

Pure: nothing here imports torch, queries a device or reads a file, but for the tables of GPUs and tiers.
"""

from lib.plan.planner import plan, with_smaller_micro_batch

__all__ = ["plan", "with_smaller_micro_batch"]
