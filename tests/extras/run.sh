#!/bin/bash
# Run tests/extras with the Python of make and the packages of requirements.txt beside it, in build/extras.
# Without these packages nothing is tested, which is a failure in CI.
set -euo pipefail
python=$1
here=$(dirname "${BASH_SOURCE[0]}")
place=${KCONFIG_OUTPUT:-.}/build/extras
if ! "$here/../../scripts/extra_environment.sh" "$python" "$here/requirements.txt" "$place"; then
	echo 'timm, transformers, PEFT and ONNX cannot be installed, so what needs them is not tested' >&2
	[ "${CI:-}" != true ] || exit 1
	exit 0
fi
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
exec "$place/bin/python" -m pytest -n 2 --dist worksteal "$here"
