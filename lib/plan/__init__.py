"""Pure planning: (Config, Hardware, ModelFacts) -> Plan with reasons."""
