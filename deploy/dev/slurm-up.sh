#!/usr/bin/env bash
# A real Slurm of several nodes on this one machine, for tests; as root, without systemd.
#
#     eval "$(deploy/dev/slurm-up.sh [DIR] [NODES])"      DIR: /var/lib/yard-slurm, NODES: 2
#     deploy/dev/slurm-down.sh [DIR] [--purge]
#
# Prints `export SLURM_CONF=...`. A second call starts what is missing, such as a node that was
# powered off (slurm-power-off.sh). One cluster per machine: while another is up this exits with status
# 75 and changes nothing. Debian and Ubuntu:
#
#     apt-get install --no-install-recommends slurm-wlm munge iproute2
#
# Jobs of partition `urgent` preempt others: those of `debug` are requeued at once, those of `spot`
# are cancelled after 20 s of grace. --mem is enforced if this machine has the memory controller of
# cgroups v1.
#
# Each node has its own PID, mount, UTS and network namespace: `hostname` says node1, ports do not
# collide, and killing the namespace's first process is a power failure.
#
#   YARD_SLURM_CPUS=4              CPUs that a node reports
#   YARD_SLURM_GPUS=0              GPUs that it reports: counted, not real
#   YARD_SLURM_NET=10.231.7        the nodes' network, /24
#   YARD_SLURM_NODE_TIMEOUT=10     seconds until a silent node counts as down
#   YARD_SLURM_REQUEUE_DELAY=5     seconds until a requeued job may start
#   YARD_SLURM_KILL_WAIT=30        seconds from SIGTERM to SIGKILL of a job that is cancelled
#   YARD_SLURM_EXTRA=              lines for slurm.conf
set -euo pipefail
# shellcheck source=deploy/dev/folders.sh
. "$(dirname "$0")/folders.sh"
GIVEN=${1:-$(default_folder yard-slurm /var/lib)}
DIR=$(realpath -m "$GIVEN")
NODES=${2:-2}
CPUS=${YARD_SLURM_CPUS:-4}
GPUS=${YARD_SLURM_GPUS:-0}
NET=${YARD_SLURM_NET:-10.231.7}
CONTROL_PORT=16817
NODE_PORT=16900
TAG='# yard-slurm'
export SLURM_CONF=$DIR/slurm.conf
SOCKET=$DIR/munge/munge.socket
OWNER=/run/yard-slurm.dir # holds the DIR of the cluster that has this machine's network
LOCK=/run/yard-slurm.lock
TAKEN=75

fail() {
  echo "slurm-up.sh: $*" >&2
  exit 1
}

alive() { # alive PROGRAM PID_FILE [DIR]
  is_running "$2" "$1" "${3:-$DIR}/"
}

check_machine() {
  [ "$(id -u)" = 0 ] || fail "needs root, for namespaces and for the users that jobs run as"
  for program in munged slurmctld slurmd ip nsenter unshare flock; do
    command -v "$program" >/dev/null || fail "$program is not installed; the head of this file says how"
  done
}

runs() {
  local file
  for file in "$1"/run/node*.pid; do alive unshare "$file" "$1" && return; done
  alive slurmctld "$1/run/slurmctld.pid" "$1" || alive munged "$1/munge/munged.pid" "$1"
}

refuse() {
  echo "slurm-up.sh: another cluster runs on this machine: $1" >&2
  exit "$TAKEN"
}

# Two clusters would share bridge and ports, and refuse each other's jobs as forged.
check_alone() {
  local owner
  owner=$(cat "$OWNER" 2>/dev/null || true)
  if [ -n "$owner" ] && [ "$owner" != "$DIR" ]; then
    ! runs "$owner" || refuse "in $owner; wait until it has ended, or end it: slurm-down.sh $owner"
    "$(dirname "$0")/slurm-down.sh" "$owner" # it is dead, and its network is left
  fi
  alive slurmctld "$DIR/run/slurmctld.pid" ||
    ! (exec 3<>"/dev/tcp/127.0.0.1/$CONTROL_PORT") 2>/dev/null ||
    refuse "port $CONTROL_PORT is taken; wait until it has ended"
  echo "$DIR" >"$OWNER"
}

start_munge() {
  mkdir -p "$DIR"/{munge,state,log,run,spool}
  chmod 711 "$DIR/munge"
  if [ ! -s "$DIR/munge/munge.key" ]; then
    dd if=/dev/urandom of="$DIR/munge/munge.key" bs=1 count=1024 status=none
    chmod 400 "$DIR/munge/munge.key"
  fi
  alive munged "$DIR/munge/munged.pid" || munged --force --socket="$SOCKET" \
    --key-file="$DIR/munge/munge.key" --pid-file="$DIR/munge/munged.pid" \
    --log-file="$DIR/log/munged.log" --seed-file="$DIR/munge/munge.seed" 2>"$DIR/log/munged.err"
}

# The bridge has its own network namespace: in the main one, Docker drops traffic forwarded between
# bridge ports, so nodes would reach the controller but not each other.
start_switch() {
  if ! ip netns list | grep -qw yard-switch; then
    ip netns add yard-switch
    ip -n yard-switch link add br0 type bridge
    ip -n yard-switch link set br0 up
    ip -n yard-switch link set lo up
    ip link add yard0 type veth peer name yard0 netns yard-switch
    ip -n yard-switch link set yard0 master br0 up
    ip addr add "$NET.1/24" dev yard0
    ip link set yard0 up
  fi
}

configure() {
  local gres='' task=task/none node
  : >"$DIR/gres.conf"
  if [ "$GPUS" -gt 0 ]; then
    gres=" Gres=gpu:$GPUS"
    echo "Name=gpu File=/dev/tty[1-$GPUS]" >"$DIR/gres.conf"
  fi
  if [ -w /sys/fs/cgroup/memory/cgroup.procs ]; then
    task=task/cgroup
    printf '%s\n' CgroupPlugin=cgroup/v1 ConstrainRAMSpace=yes >"$DIR/cgroup.conf"
  fi
  cat >"$SLURM_CONF" <<CONF
ClusterName=yard
SlurmctldHost=$(hostname -s)($NET.1)
SlurmctldPort=$CONTROL_PORT
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$SOCKET,cred_expire=${YARD_SLURM_REQUEUE_DELAY:-5}
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$DIR/run/slurmctld.pid
SlurmdPidFile=$DIR/run/slurmd.%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=$task
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerNode=4000
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmctldTimeout=5
SlurmdTimeout=${YARD_SLURM_NODE_TIMEOUT:-10}
InactiveLimit=0
KillWait=${YARD_SLURM_KILL_WAIT:-30}
MinJobAge=3600
JobRequeue=1
AccountingStorageType=accounting_storage/none
${gres:+GresTypes=gpu}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=spot Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=CANCEL GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
CONF
  grep -v "$TAG\$" /etc/hosts >"$DIR/hosts" || true
  for node in $(seq 1 "$NODES"); do
    echo "NodeName=node$node NodeHostname=node$node NodeAddr=$NET.$((10 + node)) Port=$NODE_PORT" \
      "CPUs=$CPUS RealMemory=16000$gres State=UNKNOWN" >>"$SLURM_CONF"
    echo "$NET.$((10 + node)) node$node $TAG" >>"$DIR/hosts"
  done
  cat "$DIR/hosts" >/etc/hosts # in place: containers mount it
  printf '%s\n' "${YARD_SLURM_EXTRA:-}" >>"$SLURM_CONF"
}

start_node() {
  local node=$1
  alive unshare "$DIR/run/node$node.pid" && return
  mkdir -p "$DIR/spool/node$node"
  # Remove scripts of jobs that ran at the power failure: slurmd does not overwrite a batch script.
  rm -rf "$DIR/spool/node$node"/{job*,"node${node}_"*} "$DIR/run/slurmd.node$node.pid"
  if ! ip netns list | grep -qw "yard-node$node"; then
    ip netns add "yard-node$node"
    ip -n yard-switch link add "port$node" type veth peer name eth0 netns "yard-node$node"
    ip -n yard-switch link set "port$node" master br0 up
    ip -n "yard-node$node" addr add "$NET.$((10 + node))/24" dev eth0
    ip -n "yard-node$node" link set eth0 up
    ip -n "yard-node$node" link set lo up
  fi
  # nsenter, since `ip netns exec` mounts a /sys without the cgroups that slurmd needs. bash is the
  # node's first process and reaps what slurmstepd leaves; when it ends, everything in the node ends.
  # shellcheck disable=SC2016
  setsid nsenter --net="/run/netns/yard-node$node" \
    unshare --pid --fork --kill-child=KILL --mount-proc --uts bash -c '
      hostname "$1"
      slurmd -D -N "$1" -f "$2" &
      slurmd=$!
      trap "kill $slurmd" TERM
      wait $slurmd
      wait $slurmd' node "node$node" "$SLURM_CONF" \
    </dev/null >>"$DIR/log/node$node.out" 2>&1 &
  echo $! >"$DIR/run/node$node.pid"
}

wait_until_idle() {
  for _ in $(seq 1 75); do
    [ "$(sinfo -h -N -t idle -o %N 2>/dev/null | sort -u | wc -l)" -eq "$NODES" ] && return
    sleep 0.2
  done
  sinfo -N -l >&2 || true
  tail -n 20 "$DIR"/log/* >&2
  fail "the cluster did not come up; logs are in $DIR/log"
}

check_folder "$GIVEN"
check_machine
# One script at a time: two that start together would both find the machine free. Only flock holds
# the lock (-o), or the daemons would inherit it.
[ -n "${YARD_SLURM_LOCKED:-}" ] || YARD_SLURM_LOCKED=yes exec flock -o "$LOCK" "$0" "$@"
check_alone
unset YARD_SLURM_LOCKED
own_folder "$DIR" 755 # users of jobs read slurm.conf and reach the socket of munge
start_munge
start_switch
alive slurmctld "$DIR/run/slurmctld.pid" || {
  configure
  slurmctld -f "$SLURM_CONF" >>"$DIR/log/slurmctld.out" 2>&1
}
for node in $(seq 1 "$NODES"); do start_node "$node"; done
[ -n "${YARD_SLURM_NO_WAIT:-}" ] || wait_until_idle
echo "export SLURM_CONF=$SLURM_CONF"
