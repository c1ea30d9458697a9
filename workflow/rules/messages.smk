"""The last lines of a study: its results and where they lie."""


onerror:
    # The messages of the failed commands once more, each once, where nothing drowns them.
    shell(
        "grep -A1 --no-group-separator '^tilewright: ' {log:q} | grep -v '^='"
        " | awk '!said[$0]++' >&2 || true"
    )
