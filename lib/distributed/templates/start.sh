set -e
directory=$(mktemp -d)
cat > "$directory/.config" <<'END_OF_CONFIGURATION'
@{configuration}
END_OF_CONFIGURATION
export KCONFIG_CONFIG="$directory/.config"
@{rendezvous}exec python -m train --runs @{runs} train
