"""Training: the loop, what it is built of, the tasks, planning and preflight.

Nothing here is imported by lib or models. Imported by scripts.
"""

import sys

if sys.argv[:1] == ["-m"]:  # python -m train...: its imports come before run_main
    from lib.errors import end_at_interrupt

    end_at_interrupt()
