"""The strict Kconfig front: every assignment takes, or is an error that says where, why and what to write.

Only this package reads configuration files and the variables KCONFIG_* and CONFIG_*.
"""

from lib.kconf.project import from_environment
from lib.kconf.resolve import Resolved, load, load_written, values_from_json
from lib.kconf.values import Value

__all__ = ["Resolved", "Value", "from_environment", "load", "load_written", "values_from_json"]
