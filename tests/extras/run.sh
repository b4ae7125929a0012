#!/bin/bash
# Run tests/extras with the Python of make and the packages of requirements.txt beside it, in build/extras.
# Without these packages nothing is tested, which is a failure in CI.
set -euo pipefail
python=$1
here=$(dirname "${BASH_SOURCE[0]}")
place=${KCONFIG_OUTPUT:-.}/build/extras
if ! cmp -s "$here/requirements.txt" "$place/.installed"; then
	rm -rf "$place"
	"$python" -m venv "$place"
	# torch and the tools of the tests come from the environment of make; nothing here replaces them.
	"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$("$place/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	if ! "$place/bin/python" -m pip install --quiet --no-deps -r "$here/requirements.txt"; then
		echo 'timm, transformers, PEFT and ONNX cannot be installed, so what needs them is not tested' >&2
		[ "${CI:-}" != true ] || exit 1
		exit 0
	fi
	cp "$here/requirements.txt" "$place/.installed"
fi
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
exec "$place/bin/python" -m pytest -n 2 --dist worksteal "$here"
