#!/usr/bin/env bash
# Stop the engine that engine-up.sh started, with its containers; images stay.
#
#     deploy/dev/engine-down.sh [DIR] [--purge]     --purge: remove images and volumes too
#
# A process id that is not this engine's is left alone; a folder of another user is refused.
set -euo pipefail
# shellcheck source=deploy/dev/folders.sh
. "$(dirname "$0")/folders.sh"
DIR=$(default_folder yard-engine)
purge=
for argument in "$@"; do
  case $argument in
    --purge) purge=yes ;;
    -*) echo "engine-down.sh: unknown option $argument" >&2; exit 2 ;;
    *) DIR=$argument ;;
  esac
done
DATA=${YARD_ENGINE_DATA:-/var/lib/yard-engine}
PID=$DIR/dockerd.pid

gone() { ! is_running "$PID" dockerd "$DIR/"; }

check_folder "$DIR"
if ! gone; then
  kill -TERM "$(cat "$PID")" 2>/dev/null || true
  for ((i = 0; i < 150; i++)); do
    gone && break
    sleep 0.2
  done
  if ! gone; then
    echo "engine-down.sh: dockerd $(cat "$PID") is still there after 30 s" >&2
    exit 1
  fi
fi
if [ -e "$DIR/docker0" ]; then ip link delete docker0 2>/dev/null || true; fi
if [ -e "$DIR/cpu_group" ]; then rmdir /sys/fs/cgroup/cpu/docker 2>/dev/null || true; fi
# The engine's network namespaces stay mounted after it has ended.
for held in "$DIR"/exec/netns/*; do
  if mountpoint -q "$held"; then umount "$held" || umount --lazy "$held"; fi
done
rm -rf "$DIR"
if [ -n "$purge" ]; then rm -rf "$DATA"; fi
