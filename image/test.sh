#!/usr/bin/env bash
# Builds the real Dockerfile and tries it: `make image-test`. Root, and Debian's buildah, podman,
# runc and debootstrap; no registry of images, since a Debian root file system stands in for the two
# bases. flash-attn 2, which needs nvcc, is left out. Then, with no network, no capability, a
# read-only file system and a user id that the image does not know:
#   the rules of `config/smoke.yaml` up to the PDF, a comparison, and the tests that TESTS names.
# STORE holds images and layers (about 20 GB); a second build takes its layers from there.
set -euo pipefail
cd "$(dirname "$0")/.."
SUITE=${SUITE:-bookworm}
STORE=${STORE:-${XDG_CACHE_HOME:-$HOME/.cache}/tilewright-image}
TESTS=${TESTS:-tests/test_status.py tests/test_files.py tests/study tests/project_rules/test_image.py tests/kernels/test_softmax.py}
BASE=localhost/tilewright-base:$SUITE
TAG=localhost/tilewright:test
MOST_GB=8
# Where to write the image as `make image-archive` does, "" for nowhere; it may have MOST_ARCHIVE_GB.
ARCHIVE=${ARCHIVE:-}
MOST_ARCHIVE_GB=3.4
STRANGER=4242

say() { printf '\n== %s (%d s)\n' "$*" "$SECONDS"; }

skip() {
    printf 'tilewright: image-test skipped: %s\n' "$*" >&2
    exit "${SKIPPED:-77}"
}

test "$(id -u)" = 0 || skip "needs root, for a root file system of Debian"
for tool in buildah podman runc debootstrap; do
    command -v "$tool" >/dev/null ||
        skip "$tool is missing; run: apt-get install --no-install-recommends buildah podman runc debootstrap"
done

mkdir -p "$STORE"
export CONTAINERS_STORAGE_CONF=$STORE/storage.conf CONTAINERS_CONF=$STORE/containers.conf
export BUILDAH_ISOLATION=chroot
cat >"$CONTAINERS_STORAGE_CONF" <<END
[storage]
driver = "overlay"
graphroot = "$STORE/graph"
runroot = "$STORE/run"
END
# What runs without systemd, without cgroups of version 2 and without a right to raise limits.
cat >"$CONTAINERS_CONF" <<END
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
END

# A base from a Debian root file system, with this machine's certificates and package index: a
# network may have its own. Both stay in this base and reach no image that is published.
if ! buildah inspect --type image "$BASE" >/dev/null 2>&1; then
    say "the base: $SUITE"
    root=$STORE/rootfs-$SUITE
    mirror=${MIRROR:-$(awk '/^URIs:/ { print $2; exit }' /etc/apt/sources.list.d/debian.sources)}
    test -d "$root/etc/apt" ||
        debootstrap --variant=minbase --include=ca-certificates "$SUITE" "$root" "$mirror" >"$STORE/debootstrap.log"
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
    rm -rf "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/archives/*.deb
    echo 'DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb || true"; };' >"$root/etc/apt/apt.conf.d/docker-clean"
    container=$(buildah from scratch)
    buildah add -q "$container" "$root" / >/dev/null
    certificates=/etc/ssl/certs/ca-certificates.crt
    buildah config --cmd /bin/bash --env PIP_CERT=$certificates --env SSL_CERT_FILE=$certificates "$container"
    buildah commit -q --rm "$container" "$BASE" >/dev/null
fi

say "build"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
commit=$(git rev-parse HEAD 2>/dev/null || echo unknown)
buildah bud --quiet --layers --format docker --tag "$TAG" \
    --build-arg BASE_IMAGE="$BASE" --build-arg RUNTIME_IMAGE="$BASE" --build-arg FLASH_ATTN=no \
    --build-arg TILEWRIGHT_VERSION="$version" --build-arg TILEWRIGHT_COMMIT="$commit" . \
    >"$STORE/build.log" 2>&1 || { tail -40 "$STORE/build.log" >&2; exit 1; }

say "layers"
podman history --format '{{.Size}}	{{.CreatedBy}}' "$TAG" | cut -c1-110
bytes=$(podman image inspect --format '{{.Size}}' "$TAG")
awk -v bytes="$bytes" -v most="$MOST_GB" 'BEGIN {
    printf "%.2f GB of at most %d GB\n", bytes / 1e9, most; exit bytes > most * 1e9 }'
test "$(podman image inspect --format '{{index .Labels "org.opencontainers.image.revision"}}' "$TAG")" = "$commit"

if [ -n "$ARCHIVE" ]; then
    say "archive"
    rm -f "$ARCHIVE"
    buildah push --quiet --compression-format zstd --compression-level 9 "$TAG" "oci-archive:$ARCHIVE:tilewright" >/dev/null
    awk -v bytes="$(stat -c %s "$ARCHIVE")" -v most="$MOST_ARCHIVE_GB" 'BEGIN {
        printf "%.2f GB of at most %s GB\n", bytes / 1e9, most; exit bytes > most * 1e9 }'
fi

results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
chown $STRANGER:$STRANGER "$results"

# The image as a cautious host runs it.
image() {
    podman run --rm --network none --read-only --tmpfs /tmp:exec,mode=1777 --cap-drop all \
        --security-opt no-new-privileges --user $STRANGER:$STRANGER \
        --volume "$results:/study/results" "$@"
}

say "what it holds"
image --entrypoint sh "$TAG" -c '
    set -eu
    # A command behind "!" would not end this shell.
    if command -v nvcc; then exit 1; fi
    if touch /study/Snakefile 2>/dev/null; then echo "the code can be written"; exit 1; fi
    # The extension of xFormers is linked with CUDA 12.
    python -c "import ctypes, importlib.util, pathlib, torch
folder = pathlib.Path(importlib.util.find_spec(\"xformers\").origin).parent
[extension] = folder.glob(\"_C*.so\")
ctypes.CDLL(str(extension))
print(\"loaded\", extension.name)"
    python -m json.tool sbom/sbom.cdx.json /dev/null
    for part in pkg:pypi/torch@ pkg:pypi/liger-kernel@ pkg:deb/debian/gcc@; do
        grep -q "$part" sbom/sbom.cdx.json || { echo "sbom: no $part"; exit 1; }
    done
    grep -q "^\"torch\"" sbom/licences.csv
'

say "smoke: every kernel is built and verified, and the paper written"
image "$TAG" smoke
for name in paper.pdf report.html; do
    test "$(stat -c %u "$results/smoke/$name")" = $STRANGER
done
test "$(grep -c . "$results/smoke/summary.csv")" -gt 100

say "a second run has nothing to do"
image "$TAG" smoke 2>&1 | tee "$STORE/second.log" | tail -2
grep -q "Nothing to be done" "$STORE/second.log"

say "compare"
code=0
image "$TAG" compare results/recorded/hopper results/smoke >"$STORE/compare.log" || code=$?
tail -3 "$STORE/compare.log"
case $code in 0 | 3) ;; *) exit 1 ;; esac

say "a word that is no command"
code=0
image "$TAG" rehearse || code=$?
test $code = 2

say "tests: $TESTS"
# shellcheck disable=SC2086
image "$TAG" test -q $TESTS
say "the image is as it should be"
