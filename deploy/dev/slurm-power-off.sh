#!/usr/bin/env bash
# Simulate a power failure of one node: everything in it ends at once. slurm-up.sh restarts it.
#
#     deploy/dev/slurm-power-off.sh NODE [DIR]
#
# To cut the network instead: ip -n yard-switch link set port2 down (node2; `up` heals it).
set -euo pipefail
# shellcheck source=deploy/dev/folders.sh
. "$(dirname "$0")/folders.sh"
DIR=$(realpath -m "${2:-$(default_folder yard-slurm /var/lib)}")
check_folder "$DIR"
file=$DIR/run/$1.pid
is_running "$file" unshare "$DIR/" || fail_with "no node $1 of the cluster in $DIR is up"
kill -9 "$(cat "$file")"
rm -f "$file"
