#!/bin/sh
# The entry of the image: for any user id, a read-only file system and any mount on results/.
set -eu
cd "$(dirname "$0")/.."

complain() {
    printf 'tilewright: %s\n' "$*" >&2
    exit 2
}

# A user that the image does not know has no home and no name, and caches want both.
find_home() {
    if ! test -w "${HOME:-/nowhere}"; then
        HOME=$(mktemp -d) || complain "/tmp: not writable; give it a place: --tmpfs /tmp:exec"
        export HOME
    fi
    export USER="${USER:-tilewright}" LOGNAME="${LOGNAME:-tilewright}"
    # Triton and Inductor load what they compile there.
    probe=$(mktemp -p "$HOME")
    printf '#!/bin/sh\n' >"$probe"
    chmod +x "$probe"
    "$probe" 2>/dev/null || complain "$HOME: nothing may be executed there; mount it with exec: --tmpfs /tmp:exec"
    rm "$probe"
}

# A mount on results/ hides the link to the recorded run, so it is made again, or a copy where the
# file system of the host has no links.
find_results() {
    for folder in results results/*/; do
        test -d "$folder" || continue
        case $folder in
            results/recorded/) continue ;;
        esac
        test -w "$folder" || complain "$folder: user $(id -u) may not write there; run as" \
            "--user $(stat -c %u:%g "$folder"), or: chown $(id -u) the folder that is mounted"
    done
    if test -d recorded && ! test -e results/recorded; then
        ln -sfn "$PWD/recorded" results/recorded 2>/dev/null || cp -R recorded results/recorded
    fi
    mkdir -p results/.snakemake
}

verb=study
case ${1:-} in
    -* | "") ;;
    *)
        verb=$1
        shift
        ;;
esac
case $verb in
    study | smoke)
        find_results
        find_home
        test "$verb" = study || set -- --configfile config/smoke.yaml "$@"
        exec snakemake "$@"
        ;;
    test)
        find_home
        export HYPOTHESIS_STORAGE_DIRECTORY="$HOME/.hypothesis"
        exec python -m pytest -p no:cacheprovider -n 3 --dist worksteal "$@"
        ;;
    shell)
        find_home
        exec bash "$@"
        ;;
    compare) exec python -m harness.compare "$@" ;;
    *)
        complain "$verb is no command of this image; there are: study, smoke, test, shell," \
            "compare RUN RUN. Options of Snakemake follow study or smoke, or stand alone"
        ;;
esac
