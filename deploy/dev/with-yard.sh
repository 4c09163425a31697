#!/usr/bin/env bash
# Run a command beside a real engine, a real object store and the programs of Slurm, for tests.
#
#     deploy/dev/with-yard.sh COMMAND...
#
# Parts that run already are used and left running; parts it starts are stopped after the command, and
# images are removed unless their folder existed before. As root, on Debian or Ubuntu, it also installs
# what is missing. It reports what is unavailable, and tests that need it skip. Its exit status is the
# command's.
#
#   YARD_WITH="engine store slurm"            the parts that are wanted
#   YARD_ENGINE_DATA=/var/lib/yard-engine     images and volumes; kept if it exists before
set -euo pipefail
cd "$(dirname "$0")/../.."
unset YARD_ENGINE # of an engine that is somebody's own
WITH=${YARD_WITH:-engine store slurm}
# shellcheck source=deploy/dev/folders.sh
. deploy/dev/folders.sh
STORE=$(default_folder yard-store /var/lib)
purge=()
if [ ! -e "${YARD_ENGINE_DATA:-/var/lib/yard-engine}" ]; then purge=(--purge); fi

wanted() { [[ " $WITH " == *" $1 "* ]]; }

finish() {
  local status=$?
  if [ "${YARD_ENGINE:-}" = started ]; then deploy/dev/engine-down.sh "${purge[@]}" || status=1; fi
  if [ "${started_store:-}" = yes ]; then deploy/dev/store-down.sh "$STORE" || status=1; fi
  exit "$status"
}
trap finish EXIT

evaluate() { # run a script and take over what it prints
  local printed
  printed=$("$@") || return
  eval "$printed"
}

may_install() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

if wanted engine; then
  if evaluate deploy/dev/engine-up.sh; then
    evaluate deploy/dev/base-image.sh || echo "with-yard.sh: no base image, so no image" >&2
    deploy/dev/torch-wheel.sh || echo "with-yard.sh: builds fetch torch themselves" >&2
  else
    export YARD_ENGINE=none
  fi
fi
if wanted store && [ -z "${TRAINYARD_TEST_S3_ENDPOINT:-}" ]; then
  if [ ! -s "$STORE/user" ]; then started_store=yes; fi
  evaluate deploy/dev/store-up.sh "$STORE" || echo "with-yard.sh: tests bring their own store" >&2
  # Only tests that ask for it may find it.
  unset AWS_ENDPOINT_URL AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY
fi
if wanted slurm && ! command -v slurmctld >/dev/null && may_install; then
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends slurm-wlm munge iproute2 >/dev/null
fi
"$@"
