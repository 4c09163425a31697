#!/bin/sh
exec docker run --rm \
  --entrypoint=python \
  --user=1000:1000 \
  --network=bridge \
  --add-host=host.docker.internal:host-gateway \
  --env=HOME=/tmp \
  --env=USER=trainyard \
  --env=PYTHONUNBUFFERED=1 \
  --env=TRAINYARD_RUN_DIR=/yard/gpt/.runs/pretrain/7c1f0d9a2b3e4f56-1 \
  --mount=type=bind,source=/yard/gpt/.runs/pretrain/7c1f0d9a2b3e4f56-1,target=/yard/gpt/.runs/pretrain/7c1f0d9a2b3e4f56-1 \
  --tmpfs=/tmp:rw,exec,nosuid,nodev,mode=1777,size=53687091200 \
  --shm-size=17179869184 \
  --cap-drop=ALL \
  --security-opt=no-new-privileges \
  --read-only \
  --init \
  --stop-timeout=20 \
  trainyard/merge:0.9 -m stages.merge --config /yard/gpt/.runs/pretrain/7c1f0d9a2b3e4f56-1/config.toml
