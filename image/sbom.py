"""Writes what an image holds: `python sbom.py --environment VENV --out FOLDER`.

FOLDER/sbom.cdx.json is a bill of materials (CycloneDX 1.6): the Python packages of the environment,
as cyclonedx-py finds them, and the packages of Debian or Ubuntu, as dpkg lists them.
FOLDER/licences.csv has the licence of each Python package as its metadata states it. Both name no
date and no random number: the same image has the same files.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

HERE = Path(sys.executable).parent
SYSTEM = Path("/etc/os-release")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environment", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    text = materials(options.environment, system_packages())
    (options.out / "sbom.cdx.json").write_text(text, encoding="utf-8")
    (options.out / "licences.csv").write_text(licences(options.environment), encoding="utf-8")


def materials(environment: Path, system: list[Component]) -> str:
    """Return the bill of materials as JSON; raise ValueError if it does not fit its schema."""
    call = [HERE / "cyclonedx-py", "environment", "--output-reproducible", "--of", "JSON"]
    found = subprocess.run([*call, environment], capture_output=True, text=True, check=True)
    bom = Bom.from_json(json.loads(found.stdout))
    # The library draws both anew when it reads.
    bom.serial_number = bom.metadata.timestamp = None
    bom.components.update(system)
    text = JsonV1Dot6(bom).output_as_string(indent=1) + "\n"
    problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if problem:
        raise ValueError(f"the bill of materials does not fit CycloneDX 1.6: {problem}")
    return text


def system_packages() -> list[Component]:
    """Return the packages that dpkg lists; none if the system has no dpkg."""
    try:
        text = SYSTEM.read_text(encoding="utf-8")
        call = ["dpkg-query", "--show", "--showformat", "${Package} ${Version} ${Architecture}\n"]
        listed = subprocess.run(call, capture_output=True, text=True, check=True).stdout
    except OSError:
        return []
    name = next(line[3:].strip('"') for line in text.splitlines() if line.startswith("ID="))
    return [component(name, *line.split()) for line in listed.splitlines()]


def component(system: str, name: str, version: str, architecture: str) -> Component:
    """Return one package of a Debian-like system."""
    purl = PackageURL("deb", system, name, version, {"arch": architecture})
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=version,
        purl=purl,
        bom_ref=purl.to_string(),
    )


def licences(environment: Path) -> str:
    """Return a CSV table: name, version, licence and address of each Python package."""
    call = [HERE / "pip-licenses", "--python", environment / "bin/python", "--from", "mixed"]
    call += ["--format", "csv", "--with-system", "--with-urls"]
    return subprocess.run(call, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
