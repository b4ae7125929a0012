"""Pure planning: (Config, Hardware, ModelFacts) -> Plan with reasons."""

from lib.plan.planner import plan, with_smaller_micro_batch

__all__ = ["plan", "with_smaller_micro_batch"]
