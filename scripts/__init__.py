"""Entry points of make targets and of CI, benchmarks, and what those alone use.

Nothing imports from here.
"""

import sys

if sys.argv[:1] == ["-m"]:  # python -m scripts...: its imports come before run_main
    from lib.errors import end_at_interrupt

    end_at_interrupt()
