"""Configuration commands: see `python scripts/kconf.py --help`, and `make help` for their targets."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # run as a file, Python would look for modules beside this one

from lib.errors import end_at_interrupt  # noqa: E402

if __name__ == "__main__":
    end_at_interrupt()

from lib.kconf.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], root=ROOT))
