"""Prints the manifests of Kubernetes with their values: `python cluster/render.py --image NAME`.

The image is named by digest, as a registry gives it: a tag may move while a study runs for hours.
"""

import argparse
import re
import string
import sys
from pathlib import Path

TEMPLATE = Path(__file__).with_name("kubernetes.yaml")
DIGEST = re.compile(r"[\w./:-]+@sha256:[0-9a-f]{64}")
QUANTITY = re.compile(r"[1-9][0-9]*(\.[0-9]+)?[KMGT]i")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--image", required=True, help="with its digest: name@sha256:…")
    parser.add_argument("--command", default="study", choices=("study", "smoke", "test"))
    parser.add_argument("--gpus", type=int, default=1, help="0: replay the recorded run")
    parser.add_argument("--cores", type=int, default=8)
    parser.add_argument("--memory", default="64Gi")
    parser.add_argument("--storage", default="20Gi")
    try:
        print(render(**vars(parser.parse_args())), end="")
    except ValueError as error:
        sys.exit(f"tilewright: {error}")


def render(image: str, command: str, gpus: int, cores: int, memory: str, storage: str) -> str:
    """Return the manifests as YAML; raise ValueError if a value cannot stand in them."""
    if not DIGEST.fullmatch(image):
        raise ValueError(f"--image {image}: name it by digest, name@sha256:<64 hex digits>")
    for name, text in (("memory", memory), ("storage", storage)):
        if not QUANTITY.fullmatch(text):
            raise ValueError(f"--{name} {text}: give a quantity such as 64Gi")
    if gpus < 0 or cores < 1:
        raise ValueError(f"--gpus {gpus} --cores {cores}: give at least 0 GPUs and 1 core")
    values = {"image": image, "command": command, "gpus": gpus, "cores": cores}
    template = string.Template(TEMPLATE.read_text(encoding="utf-8"))
    return template.substitute(values, memory=memory, storage=storage)


if __name__ == "__main__":
    main()
