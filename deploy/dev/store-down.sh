#!/usr/bin/env bash
# Stop the object store that store-up.sh started, and remove its contents.
#
#     deploy/dev/store-down.sh [DIR]
set -euo pipefail
# shellcheck source=deploy/dev/folders.sh
. "$(dirname "$0")/folders.sh"
DIR=${1:-$(default_folder yard-store /var/lib)}

gone() { ! is_running "$file" "$program" "$DIR/"; } # they know the folder from CEPH_CONF

check_folder "$DIR"
for daemon in radosgw:client.rgw ceph-osd:osd.0 ceph-mon:mon.a; do
  program=${daemon%:*} file=$DIR/run/${daemon#*:}.pid
  gone && continue
  kill -TERM "$(cat "$file")" 2>/dev/null || true
  for ((i = 0; i < 100; i++)); do
    gone && break
    sleep 0.1
  done
  gone || kill -KILL "$(cat "$file")" 2>/dev/null || true
done
rm -rf "$DIR"
