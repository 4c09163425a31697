# moto as an object store in memory, for tests.
ARG PYTHON_IMAGE
FROM ${PYTHON_IMAGE}
RUN --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    --mount=type=cache,target=/root/.cache/pip \
    pip install --constraint /constraints.txt 'moto[s3]' flask flask-cors && \
    useradd --create-home store
COPY deploy/dev/store.py /srv/
# hadolint ignore=DL3066
USER store
CMD ["python", "/srv/store.py", "0.0.0.0", "8333"]
