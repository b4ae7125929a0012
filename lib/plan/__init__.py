"""Pure planning: (Config, Hardware, ModelFacts) -> Plan with reasons."""

from lib.plan.planner import plan

__all__ = ["plan"]
