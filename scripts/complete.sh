#!/bin/sh
# Print what WORD, on the command line of make, can become, one a line. For scripts/completion.bash and .zsh.
#
#     scripts/complete.sh WORD
set -eu
cd "$(dirname "$0")/.."

names() { # DIRECTORY
	find "$1" -maxdepth 1 -type f ! -name '.*' ! -name '*~' -exec basename {} \; | sort
}

symbols() { # those with a prompt
	awk '/^config /{name = $2} /^\t(bool|int|string|hex) "/{print name}' \
		Kconfig lib/*/Kconfig lib/data/datasets/*/Kconfig train/Kconfig train/tasks/*/Kconfig models/*/Kconfig | sort -u
}

targets() { # as make help has them, with the names of configurations and fragments put in
	sed -n 's/^## \([A-Za-z_.-]*\): .*/\1/p' Makefile | grep -v 'NAME\|FRAGMENT\|PART'
	sed -n 's/^SCALING := scaling //p' Makefile | tr ' ' '\n'
	names defconfigs | sed 's/^/defconfig-/'
	names defconfigs | sed 's/$/_defconfig/'
	names defconfigs | sed 's/^/train-/'
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
