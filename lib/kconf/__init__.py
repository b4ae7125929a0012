"""Strict Kconfig front end: every assignment takes effect, or is an error with place, reason and remedy.

Only this package reads configuration files and the variables KCONFIG_* and CONFIG_*.
"""

from lib.kconf.project import from_environment
from lib.kconf.resolve import Resolved, load, load_written, values_from_json
from lib.kconf.values import Value

__all__ = ["Resolved", "Value", "from_environment", "load", "load_written", "values_from_json"]
