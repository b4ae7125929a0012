#!/bin/sh
# Refuse, before make removes runs, data or the environment, where a process trains in a run.
#
#     scripts/idle.sh RUNS PYTHON...
#
# The first PYTHON that is new enough looks at the locks, which needs no package. Without one it cannot look.
set -u
runs=$1
shift
for python; do
	if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
		exec "$python" -m scripts.runs --runs="$runs" --idle
	fi
done
