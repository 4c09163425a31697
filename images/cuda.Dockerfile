# Images of the stages that use GPUs, on NVIDIA's PyTorch image, which brings torch, Transformer
# Engine, flash-attn, apex and NCCL in matching builds.
#
#     docker build -f images/cuda.Dockerfile --target stage --build-arg STAGE=pretrain \
#         --build-arg VERSION=0.1.0 -t trainyard/pretrain:0.1.0-cuda .
#
# STAGE: benchmark, evaluate, pretrain, reshard, retro-embed; the other stages use no GPU and are in
# images/cpu.Dockerfile. Only the line below names NVIDIA's image.

ARG NGC_IMAGE=nvcr.io/nvidia/pytorch:26.06-py3@sha256:43c018d6a12963f1a1bad85ef8574b5c2a978eec2be0ebcacfb87f69e0d210e1

FROM ${NGC_IMAGE} AS base
# NVIDIA's image has no init; with tini from Debian's packages a stage stops in seconds.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends tini && \
    rm -rf /var/lib/apt/lists/* && \
    groupadd --gid 10001 trainyard && \
    useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home \
      --shell /usr/sbin/nologin trainyard && \
    install -d -o 10001 -g 10001 /yard
# The environment sees NVIDIA's packages and keeps ours apart from them.
RUN python -m venv --without-pip --system-site-packages /opt/trainyard
ENV PATH=/opt/trainyard/bin:${PATH} \
    LANG=C.UTF-8 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    TRAINYARD_CACHE=/tmp/trainyard-cache \
    TINI_SUBREAPER=1

FROM base AS lock
ARG STAGE
COPY images/locks/cuda/${STAGE}.txt /named.txt
RUN grep -v '^#' /named.txt >/lock.txt

FROM base AS packages
# NVIDIA pins versions by PIP_CONSTRAINT; our lock pins ours and leaves NVIDIA's builds alone.
RUN --mount=type=bind,from=lock,source=/lock.txt,target=/lock.txt \
    --mount=type=cache,target=/root/.cache/pip \
    PIP_CONSTRAINT="" pip --python /opt/trainyard install --require-hashes --no-deps -r /lock.txt

FROM base AS wheel
RUN python -m venv /opt/build
RUN --mount=type=bind,source=images/locks/build.txt,target=/build.txt \
    --mount=type=cache,target=/root/.cache/pip \
    PIP_CONSTRAINT="" /opt/build/bin/pip install --require-hashes --no-deps -r /build.txt
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY trainyard trainyard
COPY stages stages
COPY flows flows
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --no-index --wheel-dir /wheel .

FROM base AS patcher
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends patch && \
    rm -rf /var/lib/apt/lists/*

FROM packages AS installed
RUN --mount=type=bind,from=patcher,source=/usr/bin/patch,target=/usr/local/bin/patch \
    --mount=type=bind,source=images/apply-patches,target=/apply-patches \
    --mount=type=bind,source=images/patches,target=/patches \
    /apply-patches /patches /opt/trainyard/bin/python
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    PIP_CONSTRAINT="" pip --python /opt/trainyard install \
      --no-deps --no-index --no-cache-dir /wheel/*.whl
COPY --chmod=755 images/stage-entrypoint /usr/local/bin/

FROM base AS bill
RUN python -m venv /opt/bill
RUN --mount=type=bind,source=images/locks/cuda/sbom.txt,target=/sbom.txt \
    --mount=type=cache,target=/root/.cache/pip \
    PIP_CONSTRAINT="" /opt/bill/bin/pip install --require-hashes --no-deps -r /sbom.txt
ENV PATH=/opt/bill/bin:${PATH}
RUN --mount=type=bind,from=installed,source=/,target=/image \
    --mount=type=bind,source=images/sbom.py,target=/sbom.py \
    --mount=type=bind,source=images/patches,target=/patches \
    python /sbom.py --root /image --patches /patches --output /sbom.cdx.json

FROM installed AS stage
COPY --from=bill /sbom.cdx.json /usr/share/trainyard/
ARG STAGE
ARG VERSION
RUN --mount=type=bind,source=images/smoke.py,target=/smoke.py \
    --mount=type=bind,source=images/locks,target=/locks \
    HOME=/tmp python /smoke.py "$STAGE" --device cuda --version "$VERSION" --locks /locks
ARG REVISION=unknown
ENV HOME=/tmp \
    TRAINYARD_STAGE=${STAGE} \
    TRAINYARD_REVISION=${REVISION}
LABEL org.opencontainers.image.title="trainyard ${STAGE}, CUDA" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      trainyard.stage="${STAGE}"
WORKDIR /yard
USER 10001:10001
# NVIDIA's own entrypoint prints a banner and checks drivers; ours runs the stage.
ENTRYPOINT ["tini", "-g", "--", "stage-entrypoint"]
