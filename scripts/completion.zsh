# Completion of make for zsh: targets, configurations, fragments after a +, symbols, runs.
#
#     source scripts/completion.zsh
#
# Read it after compinit. Outside of such a source tree make completes as zsh has it.

_anneal_make() {
	if [[ ! -f Kconfig || ! -x scripts/complete.sh ]]; then
		_make "$@"
		return
	fi
	local -a words_found
	words_found=(${(f)"$(scripts/complete.sh "$PREFIX")"})
	compadd -S '' -- ${(M)words_found:#*=}
	compadd -- ${words_found:#*=}
}

compdef _anneal_make make
