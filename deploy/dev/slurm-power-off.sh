#!/usr/bin/env bash
# A power failure of one node: everything in it ends at once. slurm-up.sh powers it on again.
#
#     deploy/dev/slurm-power-off.sh NODE [DIR]
#
# A network that is cut instead: ip -n yard-switch link set port2 down (node2; `up` heals it).
set -euo pipefail
file=${2:-/tmp/yard-slurm}/run/$1.pid
kill -9 "$(cat "$file")"
rm -f "$file"
