#!/usr/bin/env bash
# Put torch's CPU wheel into images/wheels, where a build finds it before it asks an index.
#
#     deploy/dev/torch-wheel.sh
#
# Where pip's own configuration leads to a CPU wheel there is nothing to say. Elsewhere the builds
# fetch it themselves, and this is not needed. Refuses a CUDA wheel: it is several gigabytes.
#
#   PYTHON=python3     an interpreter of the version that the images have, 3.11
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
TORCH=$(cat images/locks/torch.txt)
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
