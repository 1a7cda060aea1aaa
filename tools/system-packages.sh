#!/bin/sh
# Usage: tools/system-packages.sh [test]    Install the system packages that local sandboxes need, and with `test` those of
# the Docker tests too (unless SKIP_DOCKER=1), where that is possible; say the one command where it is not.
set -eu
missing=""
command -v bwrap >/dev/null 2>&1 || missing="$missing bubblewrap"
if [ "${1:-}" = test ]; then
    command -v shellcheck >/dev/null 2>&1 || missing="$missing shellcheck"
    command -v ip >/dev/null 2>&1 || missing="$missing iproute2"
fi
if [ "${1:-}" = test ] && [ "${SKIP_DOCKER:-}" != 1 ]; then
    command -v dockerd >/dev/null 2>&1 || missing="$missing docker.io"
    [ -x /bin/busybox ] || missing="$missing busybox-static"
fi
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    # shellcheck disable=SC2086
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing; } >/dev/null
else
    echo "missing:$missing; install with: sudo apt-get install$missing" >&2
    exit 1
fi
