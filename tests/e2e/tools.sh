#!/usr/bin/env bash
# Make what the tests with Docker use and no user needs, in .tools: the compose plugin, built with Go
# unless it is there, and the nats CLI. The module of the plugin cannot be named to `go install`, so
# it is built in the folder into which Go puts it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

build() {
    local target=$PWD/$1 module=$2 package=$3 folder
    [[ -x $target ]] && return
    command -v go >/dev/null || {
        echo "$target is missing, and so is go to build it" >&2
        exit 1
    }
    mkdir -p "${target%/*}"
    folder=$(cd / && go mod download -json "$module" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
    (cd "$folder" && CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o "$target.new" "$package")
    mv "$target.new" "$target"
}

build .tools/docker/cli-plugins/docker-compose github.com/docker/compose/v2@v2.39.4 ./cmd
make -s tools
