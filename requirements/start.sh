#!/bin/sh
# What the image starts: Snakemake with the given options, for any user and any mount.
set -eu

complain() {
    printf 'tilewright: %s\n' "$*" >&2
    exit 2
}

# A user that the image does not know has no home and no name, and caches want both.
if ! test -w "${HOME:-/nowhere}"; then
    HOME=$(mktemp -d)
    export HOME
fi
export USER="${USER:-tilewright}" LOGNAME="${LOGNAME:-tilewright}"

test -f results/recorded/h200/manifest.json ||
    complain "results/recorded: not there; mount a folder on results/study instead of results"
for folder in . results results/*/; do
    case $folder in
        results/recorded/) ;;
        *)
            test -w "$folder" ||
                complain "$folder: user $(id -u) may not write there; run as" \
                    "--user $(stat -c %u:%g "$folder"), or: chown $(id -u) the folder that is mounted"
            ;;
    esac
done
exec snakemake "$@"
