#!/usr/bin/env bash
# A real object store on this one machine, for tests: Ceph's S3 gateway with one monitor and one
# disk, which is a file. As root, without systemd; for throw-away data.
#
#     eval "$(deploy/dev/store-up.sh [DIR])"      DIR: /var/lib/yard-store
#     deploy/dev/store-down.sh [DIR]
#
# Prints `export AWS_ENDPOINT_URL=... AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=...`, and the same
# as TRAINYARD_TEST_S3_ENDPOINT, _KEY and _SECRET, which the tests read. A second call prints the
# same. Debian and Ubuntu; installs what is missing:
#
#     apt-get install --no-install-recommends ceph-mon ceph-osd radosgw ceph-common
#
#   YARD_STORE_ADDRESS=127.0.0.1     where it listens; containers reach 0.0.0.0 or a bridge's gateway
#   YARD_STORE_PORT=9000
#   YARD_STORE_BYTES=21474836480     size of the disk, a sparse file
set -euo pipefail
# shellcheck source=deploy/dev/folders.sh
. "$(dirname "$0")/folders.sh"
DIR=${1:-$(default_folder yard-store /var/lib)}
ADDRESS=${YARD_STORE_ADDRESS:-127.0.0.1}
PORT=${YARD_STORE_PORT:-9000}
BYTES=${YARD_STORE_BYTES:-21474836480}
MONITOR_PORT=$((PORT + 14300))
PACKAGES=(ceph-mon ceph-osd radosgw ceph-common)
export CEPH_CONF=$DIR/ceph.conf DEBIAN_FRONTEND=noninteractive

fail() {
  echo "store-up.sh: $*" >&2
  exit 1
}

listens() { (exec 3<>"/dev/tcp/127.0.0.1/$PORT") 2>/dev/null; }

random() { od -An -N"$1" -tx1 /dev/urandom | tr -d ' \n'; }

check_machine() {
  [ "$(id -u)" = 0 ] || fail "needs root, as Ceph's daemons do"
  if ! dpkg -s "${PACKAGES[@]}" >/dev/null 2>&1; then
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${PACKAGES[@]}"; } \
      >"$DIR/apt.log" 2>&1 || fail "cannot install ${PACKAGES[*]}: $(tail -n 5 "$DIR/apt.log")"
  fi
}

# No cephx between the daemons, which listen on this machine only; S3 keys are checked.
write_settings() {
  cat >"$CEPH_CONF" <<CONF
[global]
fsid = $1
mon host = v2:127.0.0.1:$MONITOR_PORT
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
ms mon client mode = crc
ms mon cluster mode = crc
ms mon service mode = crc
auth cluster required = none
auth service required = none
auth client required = none
mon allow pool size one = true
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon max pg per osd = 2000
mon data avail crit = 1
mon data avail warn = 1
log file = $DIR/log/\$name.log
pid file = $DIR/run/\$name.pid
admin socket = $DIR/run/\$name.asok
run dir = $DIR/run
mon cluster log file = $DIR/log/cluster.log
[mon]
mon data = $DIR/mon
[osd]
osd data = $DIR/osd
osd objectstore = bluestore
bluestore block size = $BYTES
bluestore block create = true
osd memory target = 939524096
osd max object name len = 2048
[client]
# Without tcp_nodelay a small read takes 40 ms.
rgw frontends = beast endpoint=$ADDRESS:$PORT tcp_nodelay=1
rgw thread pool size = 64
rgw override bucket index max shards = 1
CONF
}

start_daemons() {
  local cluster disk
  cluster=$(cat /proc/sys/kernel/random/uuid)
  disk=$(cat /proc/sys/kernel/random/uuid)
  mkdir -p "$DIR"/{mon,osd,log,run}
  write_settings "$cluster"
  ceph-authtool --create-keyring "$DIR/keyring" --gen-key -n mon. --cap mon 'allow *' >/dev/null
  monmaptool --create --clobber --fsid "$cluster" --addv a "[v2:127.0.0.1:$MONITOR_PORT]" \
    "$DIR/monmap" >/dev/null
  ceph-mon -i a --mkfs --monmap "$DIR/monmap" --keyring "$DIR/keyring"
  ceph-mon -i a
  ceph --connect-timeout 20 osd new "$disk" >/dev/null
  ceph-osd -i 0 --mkfs --osd-uuid "$disk" 2>>"$DIR/log/mkfs.log"
  ceph-osd -i 0
  radosgw -n client.rgw
  for ((i = 0; i < 120; i++)); do
    listens && return
    sleep 0.5
  done
  fail "the gateway does not listen; the end of its log: $(tail -n 5 "$DIR/log/client.rgw.log")"
}

make_user() {
  local key secret
  key=yard-$(random 6)
  secret=$(random 20)
  cat >"$DIR/user" <<USER
AWS_ENDPOINT_URL=http://127.0.0.1:$PORT
AWS_ACCESS_KEY_ID=$key
AWS_SECRET_ACCESS_KEY=$secret
TRAINYARD_TEST_S3_ENDPOINT=http://127.0.0.1:$PORT
TRAINYARD_TEST_S3_KEY=$key
TRAINYARD_TEST_S3_SECRET=$secret
USER
  radosgw-admin user create --uid=yard --display-name=yard --access-key="$key" \
    --secret-key="$secret" >/dev/null 2>>"$DIR/log/admin.log"
}

own_folder "$DIR"
if ! { [ -s "$DIR/user" ] && listens; }; then
  if listens; then fail "something else listens on port $PORT; set YARD_STORE_PORT"; fi
  "$(dirname "$0")/store-down.sh" "$DIR" # a half of one may be up
  own_folder "$DIR"
  check_machine
  start_daemons
  make_user
fi
echo "export $(tr '\n' ' ' <"$DIR/user")"
