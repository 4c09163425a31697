# CPU images of the stages and the flows, built by `make images` (docs/images.md). Also faiss for
# GPUs: its CUDA comes as wheels, not from an NVIDIA image.
#
#     docker build -f images/cpu.Dockerfile --target stage --build-arg STAGE=tokenize \
#         --build-arg VERSION=0.1.0 -t trainyard/tokenize:0.1.0 .
#     ... --build-arg STAGE=pretrain --build-arg PACKAGES=torch-packages
#     ... --target flow --build-arg STAGE=flow
#     ... --target faiss-gpu --build-arg STAGE=faiss-train --build-arg LOCK=cuda/faiss-train
#
# STAGE names a package in stages and, unless LOCK does, a lock in images/locks. What differs between
# stages enters late, or in its own build step: equal locks share the layers of their packages, and
# all images with torch share its layer.

ARG PYTHON_IMAGE=python:3.11-slim-bookworm@sha256:528257d48c1da0dcecc2e725d1ae34498d60c965f1241e39cd6a85a8859bdf84
ARG PACKAGES=packages

# --- what every image begins with -----------------------------------------------------------------

FROM ${PYTHON_IMAGE} AS base
# hadolint ignore=DL3008
RUN if ! command -v tini >/dev/null; then \
      apt-get update && apt-get install -y --no-install-recommends tini && \
      rm -rf /var/lib/apt/lists/*; \
    fi && \
    groupadd --gid 10001 trainyard && \
    useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home \
      --shell /usr/sbin/nologin trainyard && \
    install -d -o 10001 -g 10001 /yard && \
    python -m venv --without-pip /opt/trainyard
ENV PATH=/opt/trainyard/bin:/usr/local/bin:/usr/bin:/bin \
    LANG=C.UTF-8 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    TRAINYARD_CACHE=/tmp/trainyard-cache \
    TINI_SUBREAPER=1

# --- torch: one layer for all images that have it -------------------------------------------------

FROM base AS torch
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# The hash of its file, if images/locks/torch does not have it; or `any`.
ARG TORCH_SHA256=
# A wheel in images/wheels is preferred.
RUN --mount=type=bind,source=images/install-torch,target=/install-torch \
    --mount=type=bind,source=images/locks/torch,target=/locks \
    --mount=type=bind,source=images/wheels,target=/wheels \
    --mount=type=cache,target=/root/.cache/pip \
    set -- pip --python /opt/trainyard install --no-deps && \
    if ls /wheels/torch-*.whl >/dev/null 2>&1; then \
      TORCH_INDEX=; set -- "$@" --no-index --find-links /wheels; \
    fi && \
    TORCH_INDEX="$TORCH_INDEX" TORCH_SHA256="$TORCH_SHA256" /install-torch /locks "$@"

# --- the packages of a stage, by hash -------------------------------------------------------------

FROM base AS lock
ARG STAGE
ARG LOCK=${STAGE}
COPY images/locks/${LOCK}.txt /named.txt
RUN grep -v '^#' /named.txt >/lock.txt

FROM base AS packages
RUN --mount=type=bind,from=lock,source=/lock.txt,target=/lock.txt \
    --mount=type=cache,target=/root/.cache/pip \
    pip --python /opt/trainyard install --require-hashes --no-deps -r /lock.txt

FROM torch AS torch-packages
RUN --mount=type=bind,from=lock,source=/lock.txt,target=/lock.txt \
    --mount=type=cache,target=/root/.cache/pip \
    pip --python /opt/trainyard install --require-hashes --no-deps -r /lock.txt

# --- trainyard itself: a wheel, made once for all images ------------------------------------------

FROM base AS wheel
RUN --mount=type=bind,source=images/locks/build.txt,target=/build.txt \
    --mount=type=cache,target=/root/.cache/pip \
    pip install --require-hashes --no-deps -r /build.txt
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY trainyard trainyard
COPY stages stages
COPY flows flows
RUN pip wheel --no-deps --no-build-isolation --no-index --wheel-dir /wheel .

# --- an image without its labels, and what is in it -----------------------------------------------

FROM base AS patcher
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends patch && \
    rm -rf /var/lib/apt/lists/*

# hadolint ignore=DL3006
FROM ${PACKAGES} AS installed
RUN --mount=type=bind,from=patcher,source=/usr/bin/patch,target=/usr/local/bin/patch \
    --mount=type=bind,source=images/apply-patches,target=/apply-patches \
    --mount=type=bind,source=images/patches,target=/patches \
    /apply-patches /patches /opt/trainyard/bin/python
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    pip --python /opt/trainyard install --no-deps --no-index --no-cache-dir /wheel/*.whl && \
    pip --python /opt/trainyard check
COPY --chmod=755 images/stage-entrypoint /usr/local/bin/

FROM base AS bill
RUN --mount=type=bind,source=images/locks/sbom.txt,target=/sbom.txt \
    --mount=type=cache,target=/root/.cache/pip \
    pip install --require-hashes --no-deps -r /sbom.txt
RUN --mount=type=bind,from=installed,source=/,target=/image \
    --mount=type=bind,source=images/sbom.py,target=/sbom.py \
    --mount=type=bind,source=images/patches,target=/patches \
    python /sbom.py --root /image --patches /patches --output /sbom.cdx.json

# --- a stage --------------------------------------------------------------------------------------

FROM installed AS stage
COPY --from=bill /sbom.cdx.json /usr/share/trainyard/
ARG STAGE
ARG VERSION
RUN --mount=type=bind,source=images/smoke.py,target=/smoke.py \
    --mount=type=bind,source=images/locks,target=/locks \
    HOME=/tmp python /smoke.py "$STAGE" --device cpu --version "$VERSION" --locks /locks
ARG REVISION=unknown
ENV HOME=/tmp \
    TRAINYARD_STAGE=${STAGE} \
    TRAINYARD_REVISION=${REVISION}
LABEL org.opencontainers.image.title="trainyard ${STAGE}" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      trainyard.stage="${STAGE}"
WORKDIR /yard
USER 10001:10001
ENTRYPOINT ["tini", "-g", "--", "stage-entrypoint"]

# --- faiss for GPUs: CUDA's runtime and cuBLAS are wheels of NVIDIA's, which the lock has by hash ---

FROM installed AS faiss-gpu
COPY --from=bill /sbom.cdx.json /usr/share/trainyard/
ARG STAGE
ARG VERSION
RUN --mount=type=bind,source=images/smoke.py,target=/smoke.py \
    --mount=type=bind,source=images/locks,target=/locks \
    HOME=/tmp python /smoke.py "$STAGE" --device cuda --version "$VERSION" --locks /locks
ARG REVISION=unknown
# The driver comes from the machine: the two are read by NVIDIA's container toolkit.
ENV HOME=/tmp \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    TRAINYARD_STAGE=${STAGE} \
    TRAINYARD_REVISION=${REVISION}
LABEL org.opencontainers.image.title="trainyard ${STAGE}, CUDA" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      trainyard.stage="${STAGE}"
WORKDIR /yard
USER 10001:10001
ENTRYPOINT ["tini", "-g", "--", "stage-entrypoint"]

# --- the flows: Prefect's server, worker and client, and no library of a stage --------------------

FROM installed AS flow
COPY --from=bill /sbom.cdx.json /usr/share/trainyard/
ARG VERSION
RUN --mount=type=bind,source=images/smoke.py,target=/smoke.py \
    --mount=type=bind,source=images/locks,target=/locks \
    HOME=/tmp PREFECT_HOME=/tmp/prefect \
    python /smoke.py flow --device cpu --version "$VERSION" --locks /locks && rm -rf /tmp/prefect
COPY prefect.yaml /srv/trainyard/
COPY deploy/dev/s3check.py /srv/trainyard/deploy/dev/
COPY recipes /srv/trainyard/recipes
COPY flows /srv/trainyard/flows
COPY deploy/yards /srv/trainyard/deploy/yards
COPY docs/troubleshooting.md /srv/trainyard/docs/
ARG REVISION=unknown
ENV HOME=/tmp \
    TRAINYARD_STAGE=flow \
    TRAINYARD_REVISION=${REVISION} \
    PREFECT_HOME=/tmp/prefect \
    PREFECT_SERVER_ANALYTICS_ENABLED=false \
    DO_NOT_TRACK=1
LABEL org.opencontainers.image.title="trainyard flow" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      trainyard.stage="flow"
WORKDIR /srv/trainyard
USER 10001:10001
ENTRYPOINT ["tini", "-g", "--"]
CMD ["prefect", "version"]
