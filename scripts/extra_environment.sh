#!/bin/bash
# Make the environment PLACE, once: packages of the file REQUIREMENTS beside those of PYTHON's environment.
#     scripts/extra_environment.sh PYTHON REQUIREMENTS PLACE
# torch and the tools of the tests come from the environment of make; nothing here replaces them.
set -euo pipefail
python=$1 requirements=$2 place=$3
cmp -s "$requirements" "$place/.installed" && exit
rm -rf "$place"
trap '[ -e "$place/.installed" ] || rm -rf "$place"' EXIT
"$python" -m venv "$place"
site='import sysconfig; print(sysconfig.get_path("purelib"))'
"$python" -c "$site" >"$("$place/bin/python" -c "$site")/base.pth"
"$place/bin/python" -m pip install --quiet --no-deps -r "$requirements"
cp "$requirements" "$place/.installed"
