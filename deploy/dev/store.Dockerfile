# moto as an object store in memory, for tests.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE}
RUN --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    --mount=type=cache,target=/root/.cache/pip \
    pip install --constraint /constraints.txt 'moto[s3]' flask flask-cors && \
    useradd --create-home store
# hadolint ignore=DL3066
USER store
CMD ["moto_server", "--host", "0.0.0.0", "--port", "8333"]
