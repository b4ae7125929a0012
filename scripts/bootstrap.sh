#!/bin/sh
# Make the Python environment that the make targets run in.
#
#     scripts/bootstrap.sh VENV PYTHON requirements.txt|requirements-dev.txt [--same-python]
#
# VENV empty: install nothing, only check that PYTHON has what is required. Else VENV is made with
# PYTHON where it does not exist, and gets the versions of the lock file. A torch that is already
# there and new enough is never replaced: neither one in VENV, nor one that PYTHON itself has.
# --same-python: PYTHON was asked for by name, so a VENV made with another version is an error.
# May be interrupted anywhere: VENV/.creating says that the next call has to start again. Of several
# calls in one source tree one works and the others wait, where there is flock.
set -eu

venv=$1 python=$2 requirements=$3
lock=${requirements%.txt}.lock
probe=$(dirname "$0")/bootstrap_probe.py

fail() {
	printf 'error: %s\n' "$1" >&2
	exit 2
}

say() {
	printf '%s\n' "$1" >&2
}

version_of() { # INTERPRETER
	"$1" -c 'import platform; print(platform.python_version())'
}

check_python() { # INTERPRETER
	command -v "$1" >/dev/null 2>&1 || fail "there is no $1; install Python 3.11 or later, or name it: make PYTHON=..."
	"$1" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' ||
		fail "$1 is Python $(version_of "$1"), 3.11 or later is needed; name one with make PYTHON=..."
}

works() { # does VENV have an interpreter that runs?
	"$venv/bin/python" -c '' 2>/dev/null
}

has_torch() { # INTERPRETER
	"$1" "$probe" requirements.txt torch >/dev/null
}

check_only() { # one interpreter start where all is well: this runs before every target
	faults=$("$python" "$probe" "$requirements" 2>/dev/null) && return
	check_python "$python"
	[ -n "$faults" ] || "$python" "$probe" "$requirements" || exit 2
	fail "$python lacks what $requirements asks for: $(printf '%s' "$faults" | tr '\n' ',' | sed 's/,/, /g'); install it yourself, or leave out VENV= to have an environment made"
}

locked() { # INTERPRETER: is there a lock for it?
	"$1" -c 'import sys; raise SystemExit(sys.version_info[:2] >= (3, 14))'
}

create() {
	check_python "$python"
	locked "$python" ||
		fail "$python is Python $(version_of "$python"), requirements.lock is for 3.11 to 3.13; name one of these with make PYTHON=..., or use what you installed yourself with make VENV="
	say "making $venv with Python $(version_of "$python") (once)"
	options=
	if has_torch "$python"; then
		"$python" -c 'import sys; raise SystemExit(sys.prefix != sys.base_prefix)' ||
			fail "$python belongs to a virtual environment that has its own torch; use it with make VENV=$("$python" -c 'import sys; print(sys.prefix)'), or name another interpreter with PYTHON="
		options=--system-site-packages
		say "$python has an adequate torch: it is kept, $venv builds on it"
	fi
	mkdir -p "$venv"
	: >"$venv/.creating"
	if command -v uv >/dev/null 2>&1; then
		# --allow-existing: the directory holds our mark already.
		uv venv --quiet --allow-existing --python "$python" $options "$venv"
	else
		"$python" -c 'import ensurepip, venv' 2>/dev/null ||
			fail "$python has no venv module; install it (Debian: apt install python3-venv) or uv, or use this interpreter as it is with make VENV="
		"$python" -m venv $options "$venv"
	fi
}

lock_tree() { # until this process ends: .creating of another one that runs would look like an interruption
	command -v flock >/dev/null 2>&1 && [ -w requirements.lock ] || return 0 # macOS has none
	exec 9<>requirements.lock # NFS locks only what is open for writing
	flock -n 9 || [ $? != 1 ] || {
		say "another make prepares an environment: waiting for it"
		flock 9
	}
}

prepare() { # leave a working VENV, touch nothing that is not ours
	if [ -e "$venv/.creating" ] || { [ -e "$venv/.created" ] && ! works; }; then
		say "$venv is incomplete: making it again"
		rm -rf "$venv"
	fi
	if works; then
		check_python "$venv/bin/python"
		return
	elif [ -d "$venv" ] && [ -n "$(ls -A "$venv")" ]; then
		fail "$venv exists and is not a working virtual environment; remove it, or name another directory with VENV="
	fi
	create
}

same_python() { # a PYTHON that an existing VENV does not follow must not pass in silence
	check_python "$python"
	[ "$(version_of "$venv/bin/python")" = "$(version_of "$python")" ] ||
		fail "$venv has Python $(version_of "$venv/bin/python"), not the $(version_of "$python") of PYTHON=$python; make mrproper first, or name another VENV="
}

wanted() { # the lock, without torch and what only torch brings where an adequate one is there
	if [ "$requirements" = requirements.txt ] && has_torch "$venv/bin/python"; then
		sed -e '/^torch==/d' -e '/# via torch$/d' "$lock"
	else
		cat "$lock"
	fi
}

# Run pip. Its output is shown as it comes with V=1, else only if it fails; a terminal gets a line of progress.
watched() { # COMMAND...
	if [ "${KCONFIG_VERBOSE:-}" = 1 ]; then
		"$@" >&2
		return
	fi
	{ "$@" 2>&1 && echo 0 >"$venv/.status" || echo 1 >"$venv/.status"; } | {
		count=0
		: >"$venv/.output"
		while read -r line; do # awk would wait for whole blocks
			printf '%s\n' "$line" >>"$venv/.output"
			case $line in
			WARNING*) printf '%s\n' "$line" >&2 ;;
			Collecting* | Processing*) count=$((count + 1)) ;;
			*Downloading* | Installing*) ;;
			*) continue ;;
			esac
			[ ! -t 2 ] || printf '\r\033[K%s' "$(printf '  packages so far: %s; %s' "$count" "$line" | cut -c 1-78)" >&2
		done
		[ ! -t 2 ] || printf '\r\033[K' >&2
	}
	read -r failed <"$venv/.status"
	[ "$failed" = 0 ] || cat "$venv/.output" >&2
	rm -f "$venv/.status" "$venv/.output"
	return "$failed"
}

install() {
	list=$venv/.wanted
	wanted >"$list"
	if command -v uv >/dev/null 2>&1; then # uv shows a progress line by itself
		quiet=--quiet
		[ -t 2 ] && quiet=
		uv pip install $quiet --python "$venv/bin/python" -r "$list"
	else
		"$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
			fail "$venv has no pip; install pip or uv, or make mrproper to have the environment made again"
		watched "$venv/bin/python" -m pip install --progress-bar off --disable-pip-version-check -r "$list" ||
			fail "pip could not install $lock; its messages are above, and the same command tries again"
	fi
	rm -f "$list"
	if [ -e "$venv/.creating" ]; then mv "$venv/.creating" "$venv/.created"; fi
}

if [ -z "$venv" ]; then
	check_only
	exit 0
fi
lock_tree
prepare
[ "${4:-}" = --same-python ] && same_python
suffix=${requirements#requirements}
stamp=$venv/.stamp${suffix%.txt}
[ "$stamp" -nt "$lock" ] && exit 0
wanted | grep -q '^torch==' && say "installing PyTorch and the rest of $lock into $venv; this downloads much and takes minutes (V=1 shows it)" ||
	say "installing $lock into $venv (V=1 shows how)"
install
say "installed"
"$venv/bin/python" "$probe" "$requirements" >&2 || fail "$venv is not what $requirements asks for"
# The first command would have to; where the tree cannot be written, each one does.
"$venv/bin/python" -m compileall -q anneal lib models train scripts >&2 || say "the bytecode of the sources is not kept"
touch "$stamp"
