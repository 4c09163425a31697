#!/usr/bin/env bash
# Put torch's CPU wheel into images/wheels, where builds look before they ask an index.
#
#     deploy/dev/torch-wheel.sh
#
# Only needed if builds cannot fetch the CPU wheel themselves but pip here can. Refuses a CUDA wheel,
# which is several gigabytes.
#
#   PYTHON=python3     an interpreter of the version that the images have, 3.11
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
TORCH=$(grep '^torch==' constraints.txt)
if ls images/wheels/torch-*.whl >/dev/null 2>&1; then exit 0; fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$PYTHON" -m pip download -q --no-deps --python-version 3.11 --only-binary :all: \
  --dest "$scratch" "$TORCH"
wheel=$(ls "$scratch"/torch-*.whl)
case $wheel in
  *+cpu*) mv "$wheel" images/wheels/ ;;
  *)
    echo "torch-wheel.sh: pip leads to $(basename "$wheel"), which is no CPU build" >&2
    exit 1
    ;;
esac
