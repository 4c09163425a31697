#!/usr/bin/env bash
# Stop the object store that store-up.sh started, and remove its contents.
#
#     deploy/dev/store-down.sh [DIR]
set -euo pipefail
DIR=${1:-/tmp/yard-store}

gone() { # a process that nobody has waited for counts as gone
  ! grep -q '^State:[[:space:]]*[^Z]' "/proc/$1/status" 2>/dev/null
}

for file in "$DIR"/run/client.rgw.pid "$DIR"/run/osd.0.pid "$DIR"/run/mon.a.pid; do
  [ -s "$file" ] || continue
  pid=$(cat "$file")
  kill -TERM "$pid" 2>/dev/null || true
  for ((i = 0; i < 100; i++)); do
    gone "$pid" && break
    sleep 0.1
  done
  gone "$pid" || kill -KILL "$pid" 2>/dev/null || true
done
rm -rf "$DIR"
