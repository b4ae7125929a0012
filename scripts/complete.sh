#!/bin/sh
# Print what WORD, on the command line of make, can become, one a line. For scripts/completion.bash and .zsh.
#
#     scripts/complete.sh WORD
set -eu
cd "$(dirname "$0")/.."

external=${ANNEAL_EXTERNAL-$(cat .external 2>/dev/null || :)}

names() { # DIRECTORY, also of EXTERNAL=
	find "$1" ${external:+"$external/$1"} -maxdepth 1 -type f ! -name '.*' ! -name '*~' 2>/dev/null | sed 's|.*/||' | sort
}

symbols() { # those with a prompt
	find Kconfig lib train models ${external:+"$external"} -name Kconfig -exec cat {} + 2>/dev/null |
		awk '/^config /{name = $2} /^\t(bool|int|string|hex) "/{print name}' | sort -u
}

targets() { # those of the table, with the names of configurations and fragments put in
	awk -v mode=targets -f scripts/targets.awk scripts/targets
	names defconfigs | sed 's/.*/defconfig-& &_defconfig train-&/' | tr ' ' '\n'
	names defconfigs/fragments | sed 's/$/.config/'
}

word=${1-}
case $word in
defconfig-*+* | train-*+*) names defconfigs/fragments | sed "s|^|${word%+*}+|" ;;
SYM=*) symbols | sed 's/^/SYM=/' ;;
CONFIG_*) symbols | sed 's/^/CONFIG_/; s/$/=/' ;;
A=* | B=* | DEFCONFIG=*) names defconfigs | sed "s|^|${word%%=*}=|" ;;
RUN=*) find runs -mindepth 2 -maxdepth 2 -type d ! -name '.*' 2>/dev/null | sort | sed 's/^/RUN=/' ;;
*=*) ;;
*) targets ;;
esac | awk -v word="$word" 'index($0, word) == 1'
