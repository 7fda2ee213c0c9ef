#!/usr/bin/env bash
# Build all images of docker-compose.yaml, and say how big they are.
#
#   deploy/images/build.sh                 from an image that has Python: PYTHON_IMAGE of .env
#   deploy/images/build.sh --no-registry   from Debian's packages, as root, with debootstrap; wheels
#                                          come from pip here, and no build step needs the network
#   deploy/images/build.sh --cuda          also gms and snapshot-agent with the CUDA bindings, as :TAG-cuda
#
# The agent's image gets CRIU from Debian's packages and a program in C, where this is a Debian with apt
# and has a compiler.
#
# SNAPBACK_TAG of .env is their tag; DEBIAN_MIRROR is where debootstrap looks.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

from_debian=
cuda=
for argument in "$@"; do
    case "$argument" in
        --no-registry) from_debian=1 ;;
        --cuda) cuda=1 ;;
        *)
            echo "build.sh: unknown argument $argument; it takes --no-registry and --cuda" >&2
            exit 2
            ;;
    esac
done

setting() { sed -n "s/^$1=//p" .env; }
tag=${SNAPBACK_TAG:-$(setting SNAPBACK_TAG)}
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
version=$(sed -n 's/^version = "\(.*\)"/\1/p' shared/pyproject.toml)

need() {
    command -v "$1" >/dev/null || {
        echo "build.sh: $1 is missing; install the package $2" >&2
        exit 1
    }
}

# A Debian with Python and nothing else. Files that only mean something on a machine that installs
# packages are left out, and dates are fixed, so that the same packages give the same image.
import_debian() {
    need debootstrap debootstrap
    ((EUID == 0)) || {
        echo "build.sh: debootstrap needs root; run it as root, or without --no-registry" >&2
        exit 1
    }
    local root
    root=$(mktemp -d)
    trap "rm -rf '$root'" EXIT
    debootstrap --variant=minbase --include=python3,python3-venv bookworm "$root" \
        "${DEBIAN_MIRROR:-http://deb.debian.org/debian}" >"$root.log" || {
        cat "$root.log" >&2
        exit 1
    }
    rm -rf "$root.log" "$root"/var/{cache,log,lib/apt/lists}/* "$root"/usr/share/{doc,info,man}/* \
        "$root"/usr/share/locale/* "$root"/etc/machine-id
    tar --create --directory "$root" --numeric-owner --sort=name --mtime=@0 . \
        | docker import --change 'CMD ["python3"]' - "$python_image" >/dev/null
    rm -rf "$root"
    trap - EXIT
}

# Make wheels of what requirements.lock names, for the Python of Debian bookworm.
fetch_wheels() {
    local python=.venv/bin/python wanted=3.11
    [[ $("$python" -V 2>/dev/null) == "Python $wanted."* ]] || python=python$wanted
    need "$python" "python$wanted"
    "$python" -m pip wheel --quiet --disable-pip-version-check --require-hashes --no-deps \
        --wheel-dir deploy/images/wheels --requirement requirements.lock
}

# What the agent has besides Python: CRIU, and the first process of containers that wait for one. Both
# are kept in .tools.
fetch_native() {
    local native=.tools/native
    rm -rf "$native"
    mkdir -p "$native"
    if make --silent criu; then
        cp -a .tools/criu "$native/criu"
    else
        echo "build.sh: the agent's image has no CRIU, and cannot capture with the driver criu" >&2
    fi
    if make --silent init; then
        cp -a .tools/snapback-init "$native/"
    else
        echo "build.sh: the agent's image has no snapback-init, for it could not be compiled; install" \
            "the packages gcc and libc6-dev" >&2
    fi
    chmod -R a+rX "$native"
}

build() {
    local name=$1 file=$2 service=${3:-} cuda=${4:-}
    echo "build.sh: $name"
    # Without the plugin buildx only the classic builder is there.
    local said
    said=$(DOCKER_BUILDKIT=$buildkit docker build --file "$file" --tag "$name" \
        --build-arg VERSION="$version" --build-arg REVISION="$revision" \
        --build-arg PYTHON_IMAGE="$python_image" ${service:+--build-arg SERVICE="$service"} \
        ${cuda:+--build-arg CUDA=1} . 2>&1) || {
        echo "$said" >&2
        exit 1
    }
}

need docker docker.io
docker version >/dev/null || exit 1
buildkit=1
docker buildx version >/dev/null 2>&1 || buildkit=0

rm -f deploy/images/wheels/*.whl
if [[ $from_debian ]]; then
    python_image=snapback-python:bookworm
    # The downloads do not need the image.
    echo "build.sh: wheels"
    fetch_wheels &
    docker image inspect "$python_image" >/dev/null 2>&1 || {
        echo "build.sh: $python_image from Debian's packages"
        import_debian
    }
    wait $!
else
    python_image=${PYTHON_IMAGE:-$(setting PYTHON_IMAGE)}
fi
fetch_native
for service in operator gms snapshot-agent snapshotctl page; do
    build "snapback/$service:$tag" deploy/images/service.Dockerfile "$service"
done
if [[ $cuda ]]; then
    for service in gms snapshot-agent; do
        build "snapback/$service:$tag-cuda" deploy/images/service.Dockerfile "$service" 1
    done
fi
build "snapback/nats:$tag" deploy/images/nats.Dockerfile
docker image ls --filter dangling=false --filter label=org.opencontainers.image.licenses=Apache-2.0 \
    --format 'table {{.Repository}}:{{.Tag}}\t{{.Size}}'
