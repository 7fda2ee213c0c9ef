# The image of any service, and of snapshotctl: SERVICE is its folder below services/. With CUDA=1 gms
# and snapshot-agent can use GPUs: they have the CUDA bindings. The driver is that of the node.
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
ARG SERVICE
COPY services/gms-client services/gms-client
COPY shared shared
COPY deploy/examples deploy/examples
COPY services/${SERVICE} services/${SERVICE}
# The pattern matches nothing where build.sh has made nothing; COPY wants one source at least.
COPY deploy/images/steps .tools/nativ[e] native/
COPY requirements-cuda.lock ./
ARG CUDA=
RUN CUDA="${CUDA}" ./steps service "${SERVICE}"

FROM base
COPY --from=build /opt/snapback /opt/snapback
COPY --from=build /build/service /usr/local/bin/service
COPY deploy/examples deploy/examples
ARG SERVICE
# A folder for each user of NATS in docker-compose.yaml: volumes take their owner from here.
RUN if [ "$SERVICE" = snapshotctl ]; then install -d -o 65532 -g 65532 -m 0700 /keys \
    /keys/nats-server /keys/operator /keys/snapshotctl /keys/viewer /keys/agent-node-1 \
    /keys/gms-node-1 /keys/agent-node-2 /keys/gms-node-2; fi
# What NVIDIA's runtime brings along: libcuda, NVML and nvidia-smi.
ARG CUDA=
ENV NVIDIA_DRIVER_CAPABILITIES=${CUDA:+compute,utility}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="snapback-$SERVICE" \
      org.opencontainers.image.description="The $SERVICE of Snapback." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
USER 65532:65532
EXPOSE 9090
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s --retries=3 CMD ["healthy"]
ENTRYPOINT ["service"]
