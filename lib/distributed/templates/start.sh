set -e
directory=$(mktemp -d)
cat > "$directory/.config" <<'END_OF_CONFIGURATION'
@{configuration}
END_OF_CONFIGURATION
# Training on CUDA sets PYTORCH_ALLOC_CONF=expandable_segments:True, unless the allocator is set here.
export KCONFIG_CONFIG="$directory/.config"
@{rendezvous}exec python -m train --runs @{runs} train
