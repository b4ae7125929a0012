"""Planning: (Config, Hardware, ModelFacts) -> Plan, with a reason for every value.

Pure: nothing here imports torch, reads a file or queries a device. Imported by lib, train and scripts.
"""

from lib.plan.planner import plan, with_smaller_micro_batch

__all__ = ["plan", "with_smaller_micro_batch"]
