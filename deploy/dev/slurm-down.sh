#!/usr/bin/env bash
# Stop the cluster that slurm-up.sh started, by the process ids it wrote down.
#
#     deploy/dev/slurm-down.sh [DIR] [--purge]      --purge: remove DIR as well
set -uo pipefail
DIR=${1:-/tmp/yard-slurm}
export SLURM_CONF=$DIR/slurm.conf
[ -f "$SLURM_CONF" ] || exit 0

# A zombie that nobody reaps is gone too.
gone() { [ ! -d "/proc/$1" ] || grep -q '^State:.Z' "/proc/$1/status" 2>/dev/null; }

timeout 10 scancel --user="$(id -un)" 2>/dev/null
for _ in $(seq 1 25); do
  [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break
  sleep 0.2
done
# `unshare --fork` ignores SIGTERM; killed, it takes all that runs in the node with it.
for file in "$DIR"/run/node*.pid; do
  [ -f "$file" ] || continue
  kill -9 "$(cat "$file")" 2>/dev/null
  rm -f "$file"
done
for file in "$DIR/run/slurmctld.pid" "$DIR/munge/munged.pid"; do
  [ -f "$file" ] || continue
  pid=$(cat "$file")
  kill "$pid" 2>/dev/null
  for _ in $(seq 1 100); do
    gone "$pid" && break
    sleep 0.1
  done
  gone "$pid" || kill -9 "$pid" 2>/dev/null
  rm -f "$file"
done
for namespace in $(ip netns list 2>/dev/null | grep -oE '^yard-(node[0-9]+|switch)'); do
  ip netns del "$namespace"
done
ip link del yard0 2>/dev/null
grep -v '# yard-slurm$' /etc/hosts >"$DIR/hosts" && cat "$DIR/hosts" >/etc/hosts
[ "${2:-}" = --purge ] && rm -rf "$DIR"
exit 0
