# PostgreSQL from Debian's packages, behaving like the registry's image, for tests.
ARG DEBIAN_IMAGE=debian:bookworm-slim@sha256:3783cc01769c7b2b1b83a5c5ad96c815348e28ed7da68e2e3687004faa906251
FROM ${DEBIAN_IMAGE}
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install -y --no-install-recommends postgresql-15 && \
    rm -rf /var/lib/apt/lists/* /var/lib/postgresql/15 && \
    install -d -o postgres -g postgres -m 700 /var/lib/postgresql/data && \
    install -d -o postgres -g postgres /var/run/postgresql
ENV PATH=/usr/lib/postgresql/15/bin:/usr/local/bin:/usr/bin:/bin \
    LANG=C.UTF-8 \
    PGDATA=/var/lib/postgresql/data
COPY --chmod=755 postgres-entrypoint /usr/local/bin/
# hadolint ignore=DL3066
USER postgres
VOLUME /var/lib/postgresql/data
STOPSIGNAL SIGINT
ENTRYPOINT ["postgres-entrypoint"]
