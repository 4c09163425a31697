#!/usr/bin/env bash
# The base images of images/ and deploy/dev/ on a machine that reaches no image registry, for tests.
#
#     eval "$(deploy/dev/base-image.sh [--force])"
#
# Makes yard-debian:bookworm from Debian's packages and yard-python:3.11 from it and the Python 3.11
# that runs here, then prints `export PYTHON_IMAGE=... DEBIAN_IMAGE=...`, which docker-compose.yml
# and deploy/dev/compose.yml read. They contain the machine's own certificates, so that pip in a
# build trusts what pip here does: do not push images built on them. If the registry's images are
# here already, or can be pulled, prints those. As root, on Debian 12:
#
#     apt-get install --no-install-recommends mmdebstrap
#
# Exit status 69 if this machine is unsuitable (no root, no packages, no Python 3.11), 1 for any other
# failure.
#
#   PYTHON=python3     the interpreter to copy; must be 3.11
set -euo pipefail
PYTHON=${PYTHON:-python3}
HERE=$(dirname "$0")
# Read from where they are pinned.
REAL_PYTHON=$(sed -n 's/^ARG PYTHON_IMAGE=//p' "$HERE/../../images/cpu.Dockerfile")
REAL_DEBIAN=$(sed -n 's/^ARG DEBIAN_IMAGE=//p' "$HERE/postgres.Dockerfile")
MADE_PYTHON=yard-python:3.11
MADE_DEBIAN=yard-debian:bookworm
LIBRARIES=ca-certificates,netbase,tzdata,tini,libssl3,libffi8,libsqlite3-0,libreadline8,libbz2-1.0
LIBRARIES=$LIBRARIES,liblzma5,zlib1g,libncursesw6,libexpat1,libuuid1,libgomp1
CERTIFICATES=/etc/ssl/certs/ca-certificates.crt
export DEBIAN_FRONTEND=noninteractive

fail() {
  echo "base-image.sh: $*" >&2
  exit 1
}

not_here() {
  echo "base-image.sh: $*" >&2
  exit 69
}

here() { docker image inspect "$1" >/dev/null 2>&1; }

answer() {
  echo "export PYTHON_IMAGE=$1 DEBIAN_IMAGE=$2"
  exit 0
}

need_mmdebstrap() {
  command -v mmdebstrap >/dev/null && return
  [ "$(id -u)" = 0 ] || not_here "needs mmdebstrap; the head of this file says how"
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends mmdebstrap; } \
    >"$scratch/apt.log" 2>&1 || not_here "cannot install mmdebstrap: $(tail -n 5 "$scratch/apt.log")"
}

make_debian() {
  mmdebstrap --quiet --variant=minbase --include="$LIBRARIES" \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' bookworm - |
    docker import -c 'CMD ["bash"]' - "$MADE_DEBIAN" >/dev/null
}

make_python() {
  local prefix version
  version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  [ "$version" = 3.11 ] || not_here "PYTHON=$PYTHON is $version, and the images are for 3.11"
  prefix=$("$PYTHON" -c 'import sys; print(sys.base_prefix)')
  tar -C "$prefix" -cf "$scratch/python.tar" --owner=0 --group=0 \
    --exclude='./lib/python*/site-packages/*' --exclude='*/test' --exclude='*/tests' \
    --exclude='*/__pycache__' --exclude='./lib/python*/config-*' --exclude='*/idlelib' \
    ./lib/python3.11 ./include ./lib/libpython3.11.so.1.0 ./lib/libpython3.11.so \
    ./bin/python3 ./bin/python3.11
  cp -L "$CERTIFICATES" "$scratch/ca.crt"
  cat >"$scratch/Dockerfile" <<DOCKERFILE
FROM $MADE_DEBIAN
ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \\
    PIP_CERT=$CERTIFICATES PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
ADD python.tar /usr/local/
COPY ca.crt $CERTIFICATES
RUN ldconfig && ln -s python3 /usr/local/bin/python && python -m ensurepip && \\
    ln -sf pip3 /usr/local/bin/pip
CMD ["python3"]
DOCKERFILE
  DOCKER_BUILDKIT=0 docker build -q -t "$MADE_PYTHON" "$scratch" >"$scratch/build.log" 2>&1 ||
    fail "$(tail -n 20 "$scratch/build.log")"
}

if [ "${1:-}" != --force ]; then
  here "$REAL_PYTHON" && here "$REAL_DEBIAN" && answer "$REAL_PYTHON" "$REAL_DEBIAN"
  here "$MADE_PYTHON" && here "$MADE_DEBIAN" && answer "$MADE_PYTHON" "$MADE_DEBIAN"
  if timeout 60 docker pull -q "$REAL_PYTHON" >/dev/null 2>&1 &&
    timeout 60 docker pull -q "$REAL_DEBIAN" >/dev/null 2>&1; then
    answer "$REAL_PYTHON" "$REAL_DEBIAN"
  fi
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
need_mmdebstrap
make_debian
make_python
answer "$MADE_PYTHON" "$MADE_DEBIAN"
