#!/bin/sh
# Check on a real GPU what is planned without one.
#
#     scripts/gpu_check.sh 1|2|3|4 OUTDIR
#
# 1: what the device keeps for itself; the simulated allocator, with expandable segments and without, and the
#    predicted memory against real ones.
# 2: the true largest micro-batch under emulated cards of 8 to 80 GiB.
# 3: torch.compile on and off, step times against their estimates, the throughput rule, and Lightning's batch size finder where it is installed.
# 4: each parallelism strategy on all GPUs of this machine: losses beside those of one GPU, memory and time
#    beside their predictions. With fewer GPUs than a strategy needs its row says so.
#
# Each part takes less than nine minutes and needs no network and nobody. Rows of JSON are appended to
# OUTDIR/part<N>.jsonl one by one, so that what was measured survives whatever ends the program; what the
# libraries print goes to OUTDIR/part<N>.log. VENV= (empty) and PYTHON= mean what they mean to make.
set -eu

cd "$(dirname "$0")/.."
venv=${VENV-.venv} python=${PYTHON:-python3}
scripts/bootstrap.sh "$venv" "$python" requirements.txt
[ -z "$venv" ] || python=$venv/bin/python
# As for every run (lib/devices/host.py); predictions follow it.
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF-expandable_segments:True}"
# The program ends by itself in time; this is for a device that hangs.
exec timeout -k 10 535 "$python" -m scripts.gpu_check.parts "$@"
