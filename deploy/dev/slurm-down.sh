#!/usr/bin/env bash
# Stop the cluster that slurm-up.sh started, by the process ids it recorded. Other clusters keep
# running.
#
#     deploy/dev/slurm-down.sh [DIR] [--purge]      --purge: remove DIR as well
set -uo pipefail
# shellcheck source=deploy/dev/folders.sh
. "$(dirname "$0")/folders.sh"
OWNER=/run/yard-slurm.dir
LOCK=/run/yard-slurm.lock
[ -n "${YARD_SLURM_LOCKED:-}" ] || YARD_SLURM_LOCKED=yes exec flock -o "$LOCK" "$0" "$@"

DIR=$(default_folder yard-slurm /var/lib)
PURGE=
for word in "$@"; do
  case $word in
    --purge) PURGE=yes ;;
    -*)
      echo "slurm-down.sh: no option $word: slurm-down.sh [DIR] [--purge]" >&2
      exit 2
      ;;
    *) DIR=$word ;;
  esac
done
check_folder "$DIR"
DIR=$(realpath -m "$DIR")
export SLURM_CONF=$DIR/slurm.conf

gone() { # gone PROGRAM PID_FILE
  ! is_running "$2" "$1" "$DIR/"
}

end_jobs() {
  # A dead controller's address may be another cluster's by now.
  ! gone slurmctld "$DIR/run/slurmctld.pid" || return
  timeout 10 scancel --user="$(id -un)" 2>/dev/null
  for _ in $(seq 1 25); do
    [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break
    sleep 0.2
  done
}

end_nodes() {
  local file
  # `unshare --fork` ignores SIGTERM; killing it kills everything in the node.
  for file in "$DIR"/run/node*.pid; do
    gone unshare "$file" || kill -9 "$(cat "$file")" 2>/dev/null
    rm -f "$file"
  done
}

end_daemons() {
  local file program
  for file in "$DIR/run/slurmctld.pid" "$DIR/munge/munged.pid"; do
    program=$(basename "$file" .pid)
    gone "$program" "$file" || kill "$(cat "$file")" 2>/dev/null
    for _ in $(seq 1 100); do
      gone "$program" "$file" && break
      sleep 0.1
    done
    gone "$program" "$file" || kill -9 "$(cat "$file")" 2>/dev/null
    rm -f "$file"
  done
}

# Resources that exist once per machine, whichever cluster has them.
end_network() {
  local namespace hosts
  for namespace in $(ip netns list 2>/dev/null | grep -oE '^yard-(node[0-9]+|switch)'); do
    ip netns del "$namespace"
  done
  ip link del yard0 2>/dev/null
  hosts=$(grep -v '# yard-slurm$' /etc/hosts) && printf '%s\n' "$hosts" >/etc/hosts
  rm -f "$OWNER"
}

if [ -f "$SLURM_CONF" ]; then
  end_jobs
  end_nodes
  end_daemons
fi
[ "$(cat "$OWNER" 2>/dev/null)" = "$DIR" ] && end_network
[ -n "$PURGE" ] && rm -rf "$DIR"
exit 0
