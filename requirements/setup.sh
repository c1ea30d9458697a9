#!/bin/sh
# Sets a machine up: `setup.sh python FOLDER` makes the virtual environment, `setup.sh check FOLDER`
# says where it is of another Python than PYTHON names, `setup.sh latex` sees to the LaTeX packages
# of the paper.
set -eu
here=$(dirname "$0")
packages="texlive-latex-recommended texlive-pictures texlive-latex-extra texlive-science latexmk"

complain() {
    printf 'tilewright: %s\n' "$*" >&2
}

set_up_python() {
    python=${PYTHON:-python3}
    supported='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'
    if ! "$python" -c "$supported" 2>/dev/null; then
        complain "$python is missing or not Python 3.11 to 3.13; name one: make PYTHON=python3.12 …"
        exit 2
    fi
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        complain "$python cannot make virtual environments; run: apt-get install python3-venv"
        exit 2
    fi
    "$python" -m venv --clear "$1"
    if [ -e /dev/nvidiactl ]; then
        "$1/bin/python" -m pip install --require-hashes --no-deps -r "$here/cuda.txt"
    else
        "$1/bin/python" -m pip install --require-hashes --no-deps -r "$here/study.txt"
        "$1/bin/python" -m pip install -r "$here/cpu.txt"
    fi
}

# An environment that is there stays: to make it anew takes minutes, and is for its owner to decide.
check_python() {
    version='import sys; print("%d.%d" % sys.version_info[:2])'
    wanted=$("${PYTHON:-python3}" -c "$version" 2>/dev/null) || return 0
    found=$("$1/bin/python" -c "$version" 2>/dev/null) || return 0
    test -z "${PYTHON:-}" || test "$wanted" = "$found" ||
        complain "$1 is of Python $found and stays; for $wanted run: rm -rf $1 && make setup PYTHON=$PYTHON"
}

has_latex() {
    command -v latexmk >/dev/null && command -v pdflatex >/dev/null &&
        kpsewhich booktabs.sty tikz.sty cleveref.sty siunitx.sty >/dev/null
}

set_up_latex() {
    has_latex && return
    install="apt-get install -y --no-install-recommends $packages"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        # Without the network the study still builds everything but the PDF.
        { apt-get update && DEBIAN_FRONTEND=noninteractive $install; } && return
    fi
    complain "no LaTeX, so no PDF; the rest is built. To have it, run: sudo $install"
}

case "${1:-} ${2:-}" in
    "python "?*) set_up_python "$2" ;;
    "check "?*) check_python "$2" ;;
    "latex ") set_up_latex ;;
    *) complain "usage: setup.sh python FOLDER | setup.sh check FOLDER | setup.sh latex" && exit 2 ;;
esac
