#!/bin/sh
# Set these variables first: AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_ENDPOINT_URL
exec docker run --rm \
  --entrypoint=torchrun \
  --user=1000:1000 \
  --workdir=/opt/yard \
  --network=host \
  --env=AWS_ACCESS_KEY_ID \
  --env=AWS_SECRET_ACCESS_KEY \
  --env=AWS_ENDPOINT_URL \
  --env=HOME=/tmp \
  --env=USER=trainyard \
  --env=PYTHONUNBUFFERED=1 \
  --env=NCCL_DEBUG=WARN \
  --env='TOLD=two words, $HOME and '"'"'quotes'"'"'' \
  --env=TRAINYARD_RUN_DIR=/yard/gpt/.runs/pretrain/7c1f0d9a2b3e4f56-1 \
  --mount=type=bind,source=/data/pile,target=/pile,readonly \
  --mount=type=bind,source=/yard,target=/yard \
  --mount=type=bind,source=/yard/gpt/.runs/pretrain/7c1f0d9a2b3e4f56-1,target=/yard/gpt/.runs/pretrain/7c1f0d9a2b3e4f56-1 \
  --tmpfs=/tmp:rw,exec,nosuid,nodev,mode=1777,size=53687091200 \
  --shm-size=17179869184 \
  --memory=1099511627776 \
  --memory-swap=1099511627776 \
  --cpus=96 \
  --gpus '"device=0,1,2,3,4,5,6,7"' \
  --ulimit=memlock=-1 \
  --ulimit=stack=67108864 \
  --device=/dev/infiniband \
  --cap-drop=ALL \
  --cap-add=CAP_IPC_LOCK \
  --security-opt=no-new-privileges \
  --read-only \
  --init \
  --stop-timeout=20 \
  registry.example.org/yard/cuda:0.9 --standalone --nnodes=1 --nproc-per-node=8 --max-restarts=0 --no-python python -m stages.merge --config /yard/gpt/.runs/pretrain/7c1f0d9a2b3e4f56-1/config.toml
