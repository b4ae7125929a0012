# Completion of make for bash: targets, configurations, fragments after a +, symbols, runs.
#
#     source scripts/completion.bash
#
# Outside of such a source tree make completes as it did before this was read.

_anneal_before=$(complete -p make 2>/dev/null | sed -n 's/.*-F \([^ ]*\).*/\1/p')

_anneal_make() {
	if [[ ! -f Kconfig || ! -x scripts/complete.sh ]]; then
		if [[ -n $_anneal_before && $_anneal_before != _anneal_make ]]; then
			"$_anneal_before" "$@"
		else
			compopt -o default
		fi
		return
	fi
	# bash has = as a word of its own, and replaces only what stands behind it.
	local word=${COMP_WORDS[COMP_CWORD]} prefix=
	if [[ $word == = ]]; then
		prefix=${COMP_WORDS[COMP_CWORD - 1]}= word=
	elif ((COMP_CWORD >= 2)) && [[ ${COMP_WORDS[COMP_CWORD - 1]} == = ]]; then
		prefix=${COMP_WORDS[COMP_CWORD - 2]}=
	fi
	mapfile -t COMPREPLY < <(scripts/complete.sh "$prefix$word")
	COMPREPLY=("${COMPREPLY[@]#"$prefix"}")
	if ((${#COMPREPLY[@]} == 1)) && [[ ${COMPREPLY[0]} == *= ]]; then
		compopt -o nospace
	fi
}

complete -F _anneal_make make
