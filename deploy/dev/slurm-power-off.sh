#!/usr/bin/env bash
# Simulate a power failure of one node: everything in it ends at once. slurm-up.sh restarts it.
#
#     deploy/dev/slurm-power-off.sh NODE [DIR]
#
# To cut the network instead: ip -n yard-switch link set port2 down (node2; `up` heals it).
set -euo pipefail
file=${2:-/tmp/yard-slurm}/run/$1.pid
kill -9 "$(cat "$file")"
rm -f "$file"
