#!/bin/sh
# Judge the goals and the variables of make's command line by the table scripts/targets, before anything is done.
#
#     scripts/check_goals.sh PYTHON "GOAL..." "VARIABLE..."
#
# Awk judges, which is immediate and there before any Python environment is. Where PYTHON is one, it is
# asked for suggestions, and which names of options there are. A note names the variables of the environment, which
# may be there for another program; those of a make around this one are meant for it.
set -u
python=$1 KCONFIG_MAKE_GOALS=$2
export KCONFIG_MAKE_GOALS
[ -z "$3" ] || [ "${MAKELEVEL:-1}" != 1 ] || printf 'note: used from the environment: %s\n' "$3" >&2

table() { # MODE
	awk -v mode="$1" -f scripts/targets.awk scripts/targets
}

judged=$(table check) && exit 0
status=$?
newline='
'
strange=${judged%%"$newline"*} error=${judged#*"$newline"}
if [ $status = 3 ] && "$python" -c 'import kconfiglib' 2>/dev/null; then
	KCONFIG_MAKE_GOALS=$strange KCONFIG_MAKE_KNOWN=$(table variables) KCONFIG_MAKE_TARGETS=$(scripts/complete.sh '') \
		"$python" scripts/kconf.py check-variables || exit 2
fi
if [ -n "$error" ] || [ $status != 3 ]; then
	printf 'error: %s\n' "$error" >&2
	exit 2
fi
